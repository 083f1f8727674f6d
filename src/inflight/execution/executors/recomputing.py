"""`RecomputingExecutor`: runs every sequence from its start in each step. An example of an executor."""

from transformers import PreTrainedModel

from inflight.execution.executors.sequential import SequentialExecutor


class RecomputingExecutor(SequentialExecutor):
    """A sequential executor without a cache."""

    name = "recomputing"

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model, in_one_piece=True, uses_cache=False)
