"""The progress bar of a call: finished prompts, and tokens per second."""

import time
from collections.abc import Iterable, Iterator

from tqdm.auto import tqdm

from inflight.contracts.outputs import TextDelta


def with_progress(deltas: Iterable[TextDelta], num_prompts: int) -> Iterator[TextDelta]:
    """Yield `deltas` unchanged and draw a progress bar of `num_prompts` prompts on standard error."""
    num_tokens, start = 0, time.monotonic()
    with tqdm(total=num_prompts, unit="prompt") as bar:
        for delta in deltas:
            num_tokens += len(delta.token_ids)
            speed = num_tokens / max(time.monotonic() - start, 1e-9)
            bar.set_postfix_str(f"{num_tokens} tokens, {speed:.0f} tokens/s", refresh=False)
            bar.update(delta.output is not None)
            yield delta
