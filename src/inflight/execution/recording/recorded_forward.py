"""`RecordedForward`: a model's forward pass without Python. It is recorded at three sizes, and then serves every step.

The operators run in the order in which the model called them, with the same arguments and the same kernels, except that
small ones run together as row kernels. The results are the same bits; whoever records a forward pass compares them.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from inflight.execution.attention import CpuCache
from inflight.execution.attention.interface import AttentionSpec
from inflight.execution.hf.hook import attend_with, attention_sinks
from inflight.execution.recording.encoding import new_program
from inflight.execution.recording.program import SAMPLES, RecordedPass, as_recorded_pass
from inflight.execution.recording.recorder import Recording


class RecordedForward:
    """Takes token ids `[T]`, positions `[T]` and logit rows `[R]`, all int64, to logits `[R, V]`; T and R are at least
    1.

    Args:
        fuses: whether small operators run as row kernels.
    """

    def __init__(self, recorded: RecordedPass, *, fuses: bool = True) -> None:
        self._program = new_program(recorded, fuses=fuses)
        weakref.finalize(self, torch.ops.inflight.delete_program, self._program)

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = torch.ops.inflight.run_program(input_ids, positions, logit_rows, self._program)
        return logits


def record_forward(
    forward: Callable[..., torch.Tensor], specs: Sequence[AttentionSpec], caches: Sequence[CpuCache]
) -> RecordedPass:
    """Record a forward pass of a model that calls our attention function. The step that its backend has begun is empty,
    so nothing is written into the cache.

    Args:
        forward: takes what `RecordedForward` does.
        specs, caches: of its attention calls, in order.

    Raises:
        UnrecordableError: it is not the same list of operators for every step.
    """
    recordings, outputs = [], []
    for num_tokens, num_logit_rows in SAMPLES:
        inputs = torch.zeros(num_tokens, dtype=torch.int64), torch.arange(num_tokens), torch.arange(num_logit_rows)
        with attend_with(_AttentionCalls(specs, caches)), Recording(inputs) as recording:
            outputs.append(forward(*inputs))
        recordings.append(recording)
    return as_recorded_pass(recordings, outputs)


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
        if spec.shares_cache_with is None:
            return torch.ops.inflight.write_and_attend(query, key, value, sinks, cache.call)[None]
        return torch.ops.inflight.attend(query, sinks, cache.call)[None]
