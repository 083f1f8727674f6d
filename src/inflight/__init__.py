"""inflight: continuous batching for Hugging Face causal language models; exact, fast on CPU, see-through.

    from inflight import LLM, SamplingParams

    llm = LLM()  # the embedded model; or a hub id, a folder, a loaded PreTrainedModel
    for output in llm.generate(["Once upon a time", "In a quiet village"], SamplingParams(max_tokens=60)):
        print(output.outputs[0].text)

Names are imported when they are first used, so that `inflight --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from inflight.host.garbage_collection import garbage_collection_paused

if TYPE_CHECKING:
    from inflight.contracts.api.config import (
        DebugConfig,
        EngineConfig,
        FleetConfig,
        KVCacheConfig,
        PrefixCacheConfig,
        QuantizationConfig,
        SchedulingConfig,
        SpeculationConfig,
    )
    from inflight.contracts.api.errors import (
        AdapterError,
        EngineDeadError,
        EngineGivenUpError,
        InvalidRequestError,
        ModelError,
        QueueFullError,
    )
    from inflight.contracts.api.outputs import (
        ClassificationOutput,
        CompletionOutput,
        EmbeddingOutput,
        Logprob,
        RequestOutput,
        ScoreOutput,
        TextDelta,
    )
    from inflight.contracts.api.params import SamplingParams
    from inflight.contracts.api.structured_output import Reasoning, StructuredOutput
    from inflight.contracts.step.record import EngineStats
    from inflight.entrypoints.async_llm import AsyncLLM
    from inflight.entrypoints.callback_llm import CallbackLLM
    from inflight.entrypoints.llm import LLM
    from inflight.entrypoints.quantization import QuantizedWeight, quantize

__version__ = "0.1.0"

_HOMES = {
    "LLM": "entrypoints.llm",
    "AsyncLLM": "entrypoints.async_llm",
    "CallbackLLM": "entrypoints.callback_llm",
    "SamplingParams": "contracts.api.params",
    "EngineConfig": "contracts.api.config",
    "FleetConfig": "contracts.api.config",
    "QuantizationConfig": "contracts.api.config",
    "KVCacheConfig": "contracts.api.config",
    "PrefixCacheConfig": "contracts.api.config",
    "SchedulingConfig": "contracts.api.config",
    "SpeculationConfig": "contracts.api.config",
    "DebugConfig": "contracts.api.config",
    "RequestOutput": "contracts.api.outputs",
    "CompletionOutput": "contracts.api.outputs",
    "Logprob": "contracts.api.outputs",
    "EmbeddingOutput": "contracts.api.outputs",
    "ClassificationOutput": "contracts.api.outputs",
    "ScoreOutput": "contracts.api.outputs",
    "TextDelta": "contracts.api.outputs",
    "AdapterError": "contracts.api.errors",
    "InvalidRequestError": "contracts.api.errors",
    "ModelError": "contracts.api.errors",
    "QueueFullError": "contracts.api.errors",
    "EngineDeadError": "contracts.api.errors",
    "EngineGivenUpError": "contracts.api.errors",
    "EngineStats": "contracts.step.record",
    "StructuredOutput": "contracts.api.structured_output",
    "Reasoning": "contracts.api.structured_output",
    "quantize": "entrypoints.quantization",
    "QuantizedWeight": "entrypoints.quantization",
}

__all__ = [
    "LLM",
    "AdapterError",
    "AsyncLLM",
    "CallbackLLM",
    "ClassificationOutput",
    "CompletionOutput",
    "DebugConfig",
    "EmbeddingOutput",
    "EngineConfig",
    "EngineDeadError",
    "EngineGivenUpError",
    "EngineStats",
    "FleetConfig",
    "InvalidRequestError",
    "KVCacheConfig",
    "Logprob",
    "ModelError",
    "PrefixCacheConfig",
    "QuantizationConfig",
    "QuantizedWeight",
    "QueueFullError",
    "Reasoning",
    "RequestOutput",
    "SamplingParams",
    "SchedulingConfig",
    "ScoreOutput",
    "SpeculationConfig",
    "StructuredOutput",
    "TextDelta",
    "__version__",
    "quantize",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'inflight' has no attribute {name!r}")
    with garbage_collection_paused():
        return getattr(import_module(f"inflight.{_HOMES[name]}"), name)
