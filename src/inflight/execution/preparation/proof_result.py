"""Results of proofs, as plain data, and their cache keys.

A proxy has random weights, so its proof holds for every model of its class and configuration, until involved code
changes (`proof_key`). Results on a model itself hold for its files, on this machine, with the same options
(`preparation_key`).
"""

import hashlib
import inspect
import json
import logging
import os
import platform
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.options import flat_options, flat_values
from inflight.execution.hf.hook import attention_in_use
from inflight.execution.hf.source import checkpoint_files
from inflight.execution.kernels import kernels_in_use, library
from inflight.execution.threads import num_threads
from inflight.execution.weights.prepacked_linear import can_prepack

logger = logging.getLogger(__name__)

NOT_OF_THE_SHAPE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
"""Entries of a configuration that do not affect a proxy."""
SOURCES = Path(__file__).parents[1]
"""The code that decides how a model runs."""
SCHEDULING = ("scheduling", "prefix_cache", "speculation")
"""Groups of options that do not affect preparation, except for the length of a row."""
ENVIRONMENT = ("ATEN_", "DNNL_", "INFLIGHT_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "PYTORCH_", "TORCH_", "TRANSFORMERS_")
"""Prefixes of environment variables that affect execution."""


@dataclass(frozen=True, slots=True)
class RunMode:
    """A way of running a model.

    Attributes:
        executor: "packed", "rows", "sequential" or "generate".
        pads: whether first spans of different lengths run together, padded.
        in_one_piece: whether prompts must run whole.
        uses_cache: whether the model has a cache.
    """

    executor: str
    pads: bool = False
    in_one_piece: bool = False
    uses_cache: bool = True

    def __str__(self) -> str:
        words = [f"{self.executor} with prompts in {'one piece' if self.in_one_piece else 'pieces'}"]
        words += ["padded"] * self.pads + ["without a cache"] * (not self.uses_cache)
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class ProofResult:
    """The result of a proof.

    Attributes:
        way: the first that is exact.
        reasons: why better modes are not exact, by mode.
        is_generated: whether the reference is what `model.generate` sees.
        why_not_prepacked: why prepacking would change the results; None: it does not.
        generate_difference: the relative error of logits between `model.generate` and one forward pass; 0 if equal.
    """

    mode: RunMode
    reasons: dict[str, str] = field(default_factory=dict)
    is_generated: bool = False
    why_not_prepacked: str | None = None
    generate_difference: float = 0.0

    @property
    def is_as_generate(self) -> bool:
        """Whether the engine matches `model.generate`."""
        return self.is_generated or self.generate_difference == 0.0


def proof_key(model: PreTrainedModel, config: EngineConfig) -> str | None:
    """A digest of everything that a proof on a model's proxy depends on; None if some of it cannot be read, such as the
    source of a class from a notebook."""
    try:
        return _digest(model, config)
    except Exception as error:
        logger.debug("the proof of %s cannot be cached: %r", type(model).__name__, error)
        return None


def preparation_key(model: PreTrainedModel, config: EngineConfig, source: str | os.PathLike[str]) -> str | None:
    """A digest of everything that the preparation of a model from `source` depends on; None if some of it cannot be
    read."""
    try:
        stats = {path.name: path.stat() for path in checkpoint_files(source, config, model.config)}
        return _digest(
            model,
            config,
            files=[(name, stat.st_size, stat.st_mtime_ns) for name, stat in sorted(stats.items())],
            whole=model.config.to_dict() | {"_name_or_path": ""},
            options=_options(config),
            environment=sorted((name, value) for name, value in os.environ.items() if name.startswith(ENVIRONMENT)),
            machine=(library.instruction_sets(), num_threads(), platform.machine()),
            kernels=library.kernels_name() if kernels_in_use() == "native" else None,
        )
    except Exception as error:
        logger.debug("the preparation of %s cannot be cached: %r", type(model).__name__, error)
        return None


def _options(config: EngineConfig) -> dict[str, Any]:
    """The options that change how a model is prepared."""
    ignored = {name for name, option in flat_options(EngineConfig).items() if option.group in SCHEDULING}
    ignored = ignored - {"max_num_batched_tokens"} | {"verify", "num_blocks", "kv_cache_memory", "adapter_memory"}
    options = {name: value for name, value in flat_values(config).items() if name not in ignored}
    return options | {"adapters": config.adapters is not None}


def _digest(model: PreTrainedModel, config: EngineConfig, **more: Any) -> str:
    parts: dict[str, Any] = more | {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "config": {key: value for key, value in model.config.to_dict().items() if key not in NOT_OF_THE_SHAPE},
        "wanted": (
            config.debug.executor,
            config.debug.attention_backend,
            config.quantization.method,
            config.kv_cache.dtype,
        ),
        "attends by": sorted(set(map(str, attention_in_use(model).values()))),
        "runs on": (str(model.dtype), model.device.type, can_prepack(model), kernels_in_use(), _processor(model)),
        "precision": (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32),
        "versions": (sys.version, *(version(name) for name in ("torch", "transformers", "inflight-llm"))),
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode())
    for path in (*_code_of(model), *own_code()):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32]


def _code_of(model: PreTrainedModel) -> list[Path]:
    """The files that define its class, the base classes, and the classes of its modules."""
    classes = {*type(model).__mro__[:-1], *map(type, model.modules())}
    return sorted({Path(inspect.getsourcefile(each) or "") for each in classes})


def own_code() -> list[Path]:
    """Our own files: any change to execution requires a new proof."""
    return sorted(path for path in SOURCES.rglob("*") if path.suffix in (".py", ".cpp", ".h"))


def _processor(model: PreTrainedModel) -> str:
    if model.device.type == "cuda":
        return str(torch.cuda.get_device_name(model.device))
    return torch.backends.cpu.get_cpu_capability()
