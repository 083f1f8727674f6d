"""`CompiledGraph`: runs a program, and so a model's forward pass without Python.

Operators run in the model's order, with the same arguments and kernels, except that small ones are fused into row
kernels. The results have the same bits, as `preparation/graph_proof.py` checks. LongRoPE, models with hooks, experts in
a model's own code, other devices and backends, and untraceable models are not compiled.
"""

import torch

from inflight.execution.graph.encode import EncodedProgram
from inflight.execution.kernels import delete_with

MAX_SHORT, ITEMS_AT_ONCE = 64, 4
"""A step of at most `MAX_SHORT` tokens runs in one call. A longer one, which may take seconds, runs `ITEMS_AT_ONCE`
items per call."""


class CompiledGraph:
    """Takes token ids `[T]`, positions `[T]` and logit rows `[R]`, all int64, to the outputs of the graph; T and R are
    at least 1.

    Attributes:
        program: the compiled program.
    """

    def __init__(self, program: EncodedProgram) -> None:
        self.program = program
        self._handle: int = torch.ops.inflight.new_program(*program[:4])
        delete_with(self, torch.ops.inflight.delete_program, self._handle)

    def __call__(self, *rows: torch.Tensor) -> list[torch.Tensor]:
        outputs: list[torch.Tensor]
        if len(rows[0]) <= MAX_SHORT:
            outputs = torch.ops.inflight.run_program(*rows, self._handle)
            return outputs
        run = torch.ops.inflight.new_program_run(*rows, self._handle)
        try:
            while torch.ops.inflight.advance_program_run(run, ITEMS_AT_ONCE):
                pass  # interrupts are handled here
            outputs = torch.ops.inflight.outputs_of_program_run(run)
        finally:
            torch.ops.inflight.delete_program_run(run)
        return outputs
