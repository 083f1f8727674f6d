"""The progress bar of a call: finished prompts, and tokens per second."""

import sys
import time
from collections.abc import Iterable, Iterator

from tqdm.auto import tqdm

from inflight.contracts.api.outputs import TextDelta


class ProgressBar:
    """A progress bar on standard error, drawn until closed; none for no prompts.

    Args:
        num_finished: prompts that were finished before.
        seconds_between: at least this long between two drawings.
    """

    def __init__(self, num_prompts: int, num_finished: int = 0, *, seconds_between: float = 0.1) -> None:
        self._bar = tqdm(
            total=num_prompts,
            initial=num_finished,
            unit="prompt",
            disable=num_prompts == 0,
            mininterval=seconds_between,
        )
        self._num_tokens, self._start = 0, time.monotonic()

    def count(self, num_tokens: int, num_finished: int) -> None:
        """Add generated tokens and finished prompts."""
        self._num_tokens += num_tokens
        speed = self._num_tokens / max(time.monotonic() - self._start, 1e-9)
        self._bar.set_postfix_str(f"{self._num_tokens} tokens, {speed:.0f} tokens/s", refresh=False)
        self._bar.update(num_finished)

    def close(self) -> None:
        """Draw the bar for the last time."""
        self._bar.close()


def seconds_between_drawings() -> float:
    """Seconds between drawings: long where each drawing becomes a log line."""
    return 0.1 if sys.stderr.isatty() else 10.0


def with_progress(
    deltas: Iterable[TextDelta], num_prompts: int, *, seconds_between: float = 0.1
) -> Iterator[TextDelta]:
    """Yield `deltas` unchanged and draw a progress bar of `num_prompts` prompts on standard error."""
    bar = ProgressBar(num_prompts, seconds_between=seconds_between)
    try:
        for delta in deltas:
            bar.count(len(delta.token_ids), delta.output is not None)
            yield delta
    finally:
        bar.close()
