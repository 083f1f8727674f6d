"""`RecordedForward`: a model's forward pass without Python. It is recorded at a few sizes, and then serves every step.

The operators run in the order in which the model called them, with the same arguments and the same kernels, except that
small ones run together as row kernels. The results are the same bits; `graph_proof` compares them.

Not recorded are LongRoPE, models with hooks, experts in a model's own code, and other devices and backends; so are
models that branch on the length or on a value, or keep a state: a run without data, as long as a step may be, must be
what the shorter ones predict.
"""

import logging
from collections.abc import Callable, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from inflight.execution.graph.encode import Program
from inflight.execution.graph.graph import SAMPLES, RecordedPass, RecordedRun, as_recorded_pass
from inflight.execution.graph.trace import Recording, UnrecordableError
from inflight.execution.kernels import delete_with

logger = logging.getLogger(__name__)

LEAST_LONG, LONG_LOGIT_ROWS = 64, 7
"""The fewest tokens of the run without data, and its rows of logits."""
MAX_SHORT, ITEMS_AT_ONCE = 64, 4
"""A step of at most so many tokens runs in one call. Of a longer one, which may take seconds, so many operators and
kernels run in each call."""


class RecordedForward:
    """Takes token ids `[T]`, positions `[T]` and logit rows `[R]`, all int64, to what the pass gives; T and R are at
    least 1.

    Attributes:
        program: what it runs.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._program: int = torch.ops.inflight.new_program(*program[:4])
        delete_with(self, torch.ops.inflight.delete_program, self._program)

    def __call__(self, *rows: torch.Tensor) -> list[torch.Tensor]:
        outputs: list[torch.Tensor]
        if len(rows[0]) <= MAX_SHORT:
            outputs = torch.ops.inflight.run_program(*rows, self._program)
            return outputs
        run = torch.ops.inflight.new_program_run(*rows, self._program)
        try:
            while torch.ops.inflight.advance_program_run(run, ITEMS_AT_ONCE):
                pass  # here an interrupt comes through
            outputs = torch.ops.inflight.outputs_of_program_run(run)
        finally:
            torch.ops.inflight.delete_program_run(run)
        return outputs


def record_forward(forward: Callable[..., Sequence[torch.Tensor]], max_tokens: int) -> RecordedPass:
    """Record a forward pass. Its model runs a few times, on tokens of no meaning.

    Args:
        forward: takes and gives what `RecordedForward` does.
        max_tokens: the most tokens of a step. So many are recorded, too, without data: a model may do something else
            with long rows.

    Raises:
        UnrecordableError: it is not the same list of operators for every step.
    """
    runs = [_record(forward, *sample) for sample in SAMPLES]
    longest = max(max_tokens, LEAST_LONG), LONG_LOGIT_ROWS
    with FakeTensorMode(allow_non_fake_inputs=True):
        try:
            long_run = _record(forward, *longest)
        except UnrecordableError:
            raise
        except Exception as error:
            logger.debug("a forward pass without data failed", exc_info=True)
            raise UnrecordableError(f"it cannot run without data ({type(error).__name__})") from error
    return as_recorded_pass(runs, long_run, longest)


def _record(forward: Callable[..., Sequence[torch.Tensor]], num_tokens: int, num_logit_rows: int) -> RecordedRun:
    inputs = torch.zeros(num_tokens, dtype=torch.int64), torch.arange(num_tokens), torch.arange(num_logit_rows)
    with Recording(inputs) as recording:
        outputs = forward(*inputs)
    return RecordedRun(recording, tuple(map(recording.see, outputs)))
