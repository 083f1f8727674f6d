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
    from inflight.contracts.config import (
        DebugConfig,
        EngineConfig,
        FleetConfig,
        KVCacheConfig,
        PrefixCacheConfig,
        QuantizationConfig,
        SchedulingConfig,
        SpeculationConfig,
    )
    from inflight.contracts.errors import (
        AdapterError,
        EngineDeadError,
        EngineGivenUpError,
        InvalidRequestError,
        ModelError,
        QueueFullError,
    )
    from inflight.contracts.outputs import (
        ClassificationOutput,
        CompletionOutput,
        EmbeddingOutput,
        Logprob,
        RequestOutput,
        ScoreOutput,
        TextDelta,
    )
    from inflight.contracts.params import SamplingParams
    from inflight.contracts.record import EngineStats
    from inflight.contracts.structured_output import Reasoning, StructuredOutput
    from inflight.entrypoints.async_llm import AsyncLLM
    from inflight.entrypoints.callback_llm import CallbackLLM
    from inflight.entrypoints.llm import LLM
    from inflight.entrypoints.quantization import QuantizedWeight, quantize

__version__ = "0.1.0"

_HOMES = {
    "LLM": "entrypoints.llm",
    "AsyncLLM": "entrypoints.async_llm",
    "CallbackLLM": "entrypoints.callback_llm",
    "SamplingParams": "contracts.params",
    "EngineConfig": "contracts.config",
    "FleetConfig": "contracts.config",
    "QuantizationConfig": "contracts.config",
    "KVCacheConfig": "contracts.config",
    "PrefixCacheConfig": "contracts.config",
    "SchedulingConfig": "contracts.config",
    "SpeculationConfig": "contracts.config",
    "DebugConfig": "contracts.config",
    "RequestOutput": "contracts.outputs",
    "CompletionOutput": "contracts.outputs",
    "Logprob": "contracts.outputs",
    "EmbeddingOutput": "contracts.outputs",
    "ClassificationOutput": "contracts.outputs",
    "ScoreOutput": "contracts.outputs",
    "TextDelta": "contracts.outputs",
    "AdapterError": "contracts.errors",
    "InvalidRequestError": "contracts.errors",
    "ModelError": "contracts.errors",
    "QueueFullError": "contracts.errors",
    "EngineDeadError": "contracts.errors",
    "EngineGivenUpError": "contracts.errors",
    "EngineStats": "contracts.record",
    "StructuredOutput": "contracts.structured_output",
    "Reasoning": "contracts.structured_output",
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
