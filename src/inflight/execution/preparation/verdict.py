"""What a proof has shown, as plain data; and the folder in which what twins have shown is remembered.

A twin has random weights: what it shows holds for every model of its class and configuration, as long as the versions
of all code concerned are the same. So a model need not be proved anew whenever it is loaded; that its own results are
its plain ones is looked at every time.
"""

import hashlib
import inspect
import json
import logging
import os
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from inflight.contracts.config import EngineConfig
from inflight.execution.hf.hook import attention_in_use
from inflight.execution.kernels import cache_folder, kernels_available
from inflight.execution.weights.prepacked_linear import can_prepack

logger = logging.getLogger(__name__)

NOT_OF_THE_SHAPE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
"""Of a configuration: what a twin does not look at."""
SOURCES = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Way:
    """A way of running a model.

    Attributes:
        executor: its name.
        pads: whether beginnings of different lengths run together.
        in_one_piece: whether prompts are only run whole.
        uses_cache: whether anything is kept.
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
class Verdict:
    """What a proof has shown.

    Attributes:
        way: the first exact one.
        reasons: why not as would have been better, by how.
        is_generated: whether exact means as `model.generate` sees.
        why_not_prepacked: what packing its weights would spoil; None: nothing.
    """

    way: Way
    reasons: dict[str, str] = field(default_factory=dict)
    is_generated: bool = False
    why_not_prepacked: str | None = None

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Verdict":
        """What `to_json` gave. Raises `ValueError`, `TypeError` or `KeyError` for anything else."""
        values = json.loads(line)
        return cls(**(values | {"way": Way(**values["way"])}))


class VerdictCache:
    """Verdicts in files, each named by a digest of all that it depends on. A folder that cannot be read or written is
    like an empty one.

    Args:
        folder: where they are; None: nothing is remembered.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @property
    def remembers(self) -> bool:
        """Whether anything is kept."""
        return self._folder is not None

    @classmethod
    def of_the_user(cls) -> "VerdictCache":
        """In the folder where the kernels are kept; nowhere if `INFLIGHT_REMEMBER_VERDICTS` is 0."""
        if os.environ.get("INFLIGHT_REMEMBER_VERDICTS") == "0":
            return cls(None)
        try:
            return cls(cache_folder() / "verdicts")
        except OSError:
            return cls(None)

    def find(self, key: str | None) -> Verdict | None:
        """The verdict of this key, if there is one."""
        if self._folder is None or key is None:
            return None
        try:
            return Verdict.from_json((self._folder / f"{key}.json").read_text())
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def keep(self, key: str | None, verdict: Verdict) -> None:
        """For the next time."""
        if self._folder is None or key is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._folder) as folder:
                whole = Path(folder) / "verdict.json"
                whole.write_text(verdict.to_json())
                os.replace(whole, self._folder / f"{key}.json")
        except OSError as error:
            logger.info("what the proof has shown cannot be remembered: %s", error)

    def forget(self, key: str | None) -> None:
        """It has proved to be wrong."""
        if self._folder is not None and key is not None:
            with suppress(OSError):
                (self._folder / f"{key}.json").unlink(missing_ok=True)


def verdict_key(model: PreTrainedModel, config: EngineConfig) -> str | None:
    """A digest of all that the verdict on a model's twin depends on; None if there is something that cannot be looked
    into, such as a class that was written in a notebook."""
    try:
        return _digest(model, config)
    except Exception as error:
        logger.debug("what is proved of %s cannot be remembered: %r", type(model).__name__, error)
        return None


def _digest(model: PreTrainedModel, config: EngineConfig) -> str:
    parts: dict[str, Any] = {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "config": {key: value for key, value in model.config.to_dict().items() if key not in NOT_OF_THE_SHAPE},
        "wanted": (config.executor, config.attention_backend, config.quantization, config.kv_cache_dtype),
        "attends by": sorted(set(map(str, attention_in_use(model).values()))),
        "runs on": (str(model.dtype), model.device.type, can_prepack(model), kernels_available(), _processor(model)),
        "precision": (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32),
        "versions": (sys.version, *(version(name) for name in ("torch", "transformers", "inflight-llm"))),
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode())
    for path in (*_code_of(model), *_own_code()):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32]


def _code_of(model: PreTrainedModel) -> list[Path]:
    """The files of its class, of all that it is derived from, and of its modules'."""
    classes = {*type(model).__mro__[:-1], *map(type, model.modules())}
    return sorted({Path(inspect.getsourcefile(each) or "") for each in classes})


def _own_code() -> list[Path]:
    """Whoever changes how a model is run wants it proved anew."""
    return sorted(path for path in SOURCES.rglob("*") if path.suffix in (".py", ".cpp", ".h"))


def _processor(model: PreTrainedModel) -> str:
    if model.device.type == "cuda":
        return str(torch.cuda.get_device_name(model.device))
    return torch.backends.cpu.get_cpu_capability()
