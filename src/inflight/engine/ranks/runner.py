"""`make_runner`: an engine's runner: of a whole model, or of rank 0."""

from collections.abc import Callable
from dataclasses import replace

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.errors import ModelError, RankLostError
from inflight.contracts.api.features import INSPECTION, Features
from inflight.contracts.api.model_info import ModelInfo
from inflight.contracts.api.pooling import PoolingPlan
from inflight.contracts.step.plan import StepPlan, StepTokens
from inflight.engine.ranks.group import RankGroup
from inflight.execution.executors import PackedExecutor
from inflight.execution.hf.load import ModelSource
from inflight.execution.model_runner import ModelRunner
from inflight.execution.sampling.sampler import TokenMasks
from inflight.host.garbage_collection import call_after


def make_runner(model: ModelSource, config: EngineConfig, pooling: PoolingPlan | None = None) -> ModelRunner:
    """Return a ready runner. Raises `ModelError`.

    Args:
        pooling: how the model pools; None: it generates.
    """
    if config.tensor_parallel_size == 1 or pooling is not None:  # which is refused there
        return ModelRunner(model, config, pooling=pooling)
    if not isinstance(model, str):
        raise ModelError(
            f"the model is a loaded {type(model).__name__}, which other processes cannot have; with a "
            "tensor_parallel_size, give its hub id or folder"
        )
    return LeadingRunner(model, config)


class LeadingRunner(ModelRunner):
    """The runner of rank 0: all ranks run its plans.

    Raises:
        ModelError: the model cannot be loaded, divided, or run exactly.
        RankLostError: another rank has ended (from `run`).
    """

    def __init__(self, model: str, config: EngineConfig) -> None:
        self._group = group = RankGroup(model, config)
        call_after(self, group.end)
        try:
            with group.preparing():
                super().__init__(model, group.config, group.rank)
            group.check(self.info)
        except BaseException:
            group.end()
            raise
        self.info = _of_all(self.info, config.tensor_parallel_size)

    def run(self, plan: StepPlan, masks: Callable[[], TokenMasks] | None = None) -> StepTokens:
        """Run one step on all ranks; see `ModelRunner`."""
        with self._group.step(plan):
            return super().run(plan, masks)

    def when_lost(self, call: Callable[[RankLostError], None]) -> None:
        """Set a function to call, in another thread, when a rank has ended and no step can run any more."""
        self._group.when_lost(call)

    def require_packed(self) -> PackedExecutor:
        """Raises `ModelError`: this process has only a shard of the model."""
        Features.from_info(self.info).require(INSPECTION)
        return super().require_packed()


def _of_all(info: ModelInfo, size: int) -> ModelInfo:
    """One rank's `ModelInfo`, as that of all ranks together."""
    return replace(
        info,
        num_ranks=size,
        kv_bytes_per_token=size * info.kv_bytes_per_token,
        kv_bytes_per_lasting_token=size * info.kv_bytes_per_lasting_token,
        weights=tuple(replace(each, num_bytes=size * each.num_bytes) for each in info.weights),
    )
