"""`RecordedForward`: a model's forward pass without Python. It is recorded at a few sizes, and then serves every step.

The operators run in the order in which the model called them, with the same arguments and the same kernels, except that
small ones run together as row kernels. The results are the same bits; whoever records a forward pass compares them.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from inflight.execution.attention import CpuCache
from inflight.execution.attention.interface import AttentionSpec
from inflight.execution.hf.hook import attend_with, attention_sinks
from inflight.execution.recording.encoding import encoded
from inflight.execution.recording.program import SAMPLES, RecordedPass, RecordedRun, as_recorded_pass
from inflight.execution.recording.recorder import Recording, UnrecordableError

logger = logging.getLogger(__name__)

LEAST_LONG, LONG_LOGIT_ROWS = 64, 7
MAX_SHORT, ITEMS_AT_ONCE = 64, 4
"""Tokens of a step that runs in one call; and how many operators and kernels do of a longer one, which takes longer."""


class RecordedForward:
    """Takes token ids `[T]`, positions `[T]` and logit rows `[R]`, all int64, to logits `[R, V]`; T and R are at least
    1.

    Args:
        fuses: whether small operators run as row kernels.
    """

    def __init__(self, recorded: RecordedPass, *, fuses: bool = True) -> None:
        self._program: int = torch.ops.inflight.new_program(*encoded(recorded, fuses=fuses))
        weakref.finalize(self, torch.ops.inflight.delete_program, self._program)

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor
        if len(input_ids) <= MAX_SHORT:
            logits = torch.ops.inflight.run_program(input_ids, positions, logit_rows, self._program)
            return logits
        run = torch.ops.inflight.new_program_run(input_ids, positions, logit_rows, self._program)
        try:
            while torch.ops.inflight.advance_program_run(run, ITEMS_AT_ONCE):
                pass  # here an interrupt comes through
            logits = torch.ops.inflight.output_of_program_run(run)
        finally:
            torch.ops.inflight.delete_program_run(run)
        return logits


def record_forward(
    forward: Callable[..., torch.Tensor], specs: Sequence[AttentionSpec], caches: Sequence[CpuCache], max_tokens: int
) -> RecordedPass:
    """Record a forward pass of a model that calls our attention function. The step that its backend has begun is empty,
    so nothing is written into the cache.

    Args:
        forward: takes what `RecordedForward` does.
        specs, caches: of its attention calls, in order.
        max_tokens: the most tokens of a step. So many are recorded, too, without data: a model may do something else
            with long rows.

    Raises:
        UnrecordableError: it is not the same list of operators for every step.
    """
    runs = []
    for num_tokens, num_logit_rows in SAMPLES:
        runs.append(_record(forward, specs, caches, num_tokens, num_logit_rows))
    longest = max(max_tokens, LEAST_LONG), LONG_LOGIT_ROWS
    with FakeTensorMode(allow_non_fake_inputs=True):
        try:
            long_run = _record(forward, specs, caches, *longest)
        except UnrecordableError:
            raise
        except Exception as error:
            logger.debug("a forward pass without data failed", exc_info=True)
            raise UnrecordableError(f"it cannot run without data ({type(error).__name__})") from error
    return as_recorded_pass(runs, long_run, longest)


def _record(
    forward: Callable[..., torch.Tensor],
    specs: Sequence[AttentionSpec],
    caches: Sequence[CpuCache],
    num_tokens: int,
    num_logit_rows: int,
) -> RecordedRun:
    inputs = torch.zeros(num_tokens, dtype=torch.int64), torch.arange(num_tokens), torch.arange(num_logit_rows)
    with attend_with(_AttentionCalls(specs, caches)), Recording(inputs) as recording:
        output = forward(*inputs)
    return RecordedRun(recording, recording.see(output))


class _AttentionCalls:
    """Answers the attention calls of one forward pass through the kernel alone."""

    def __init__(self, specs: Sequence[AttentionSpec], caches: Sequence[CpuCache]) -> None:
        self._calls = zip(specs, caches, strict=True)

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        spec, cache = next(self._calls)
        query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
        sinks = attention_sinks(module, kwargs)
        sinks = None if sinks is None else sinks.float()
        output: torch.Tensor
        if spec.shares_cache_with is None:
            output = torch.ops.inflight.write_and_attend(query, key, value, sinks, cache.call)
        else:
            output = torch.ops.inflight.attend(query, sinks, cache.call, spec.value_head_size)
        return output[None]
