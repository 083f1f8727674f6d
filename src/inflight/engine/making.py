"""`make_engine`: the engine for a model, whether it generates or pools."""

from inflight.contracts.config import EngineConfig
from inflight.engine import engine as generating
from inflight.engine.pooling import PoolingEngine
from inflight.execution.hf.load import ModelSource
from inflight.pooling.checkpoint import pooling_plan
from inflight.text.tokenizer import Tokenizer


def make_engine(
    model: ModelSource, config: EngineConfig, tokenizer: Tokenizer | None
) -> "generating.Engine | PoolingEngine":
    """Load a model, and make the engine that it needs. Raises `ModelError`."""
    plan = pooling_plan(model, config, tokenizer)
    if plan is not None:
        return PoolingEngine(model, config, plan)
    return generating.Engine(model, config, tokenizer)
