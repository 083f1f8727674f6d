"""Loading: makes our own `transformers` model, on its device, from a hub id, a folder, a GGUF file or a loaded
model.

`WatchedWeights`: detects changes of a caller's model after an engine was made from it.

An engine copies most weights into its own layout, and shares a few large ones. After a training step it would mix old
and new weights.

Reads a checkpoint's `generation_config`: default sampling parameters, EOS tokens, and unsupported settings.
"""

import copy
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import CellType, FunctionType, MethodType
from typing import Any, TypeAlias

import torch
from transformers import AutoModelForMultimodalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from inflight.contracts.api.config import CACHE_SHARE_OF_HOST, EngineConfig
from inflight.contracts.api.errors import ModelError
from inflight.contracts.api.params import SamplingParams
from inflight.execution.hf.gguf_model import load_gguf_model
from inflight.execution.hf.model_class import auto_class_of, encoder_parameters
from inflight.execution.hf.quantized_model import load_quantized_model
from inflight.execution.hf.source import first_line, read_config
from inflight.execution.hf.state import refuse_incomplete
from inflight.gguf.find import find_gguf
from inflight.gguf.header import GgufHeader
from inflight.host.machine import usable_memory

SUPPRESSES = ("suppress_tokens", "begin_suppress_tokens")
"""Settings that hold only where the model's own `generate` runs a prompt."""
NOT_HONOURED = {
    *("num_beams", "penalty_alpha", "guidance_scale", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"),
    *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "exponential_decay_length_penalty"),
    *("bad_words_ids", "sequence_bias", *SUPPRESSES),
    *("forced_bos_token_id", "forced_eos_token_id", "min_length", "min_new_tokens", "max_length", "stop_strings"),
    *("num_return_sequences", "watermarking_config", "max_time"),
}
"""Settings that change `model.generate`'s output, but not ours."""


def default_sampling_params(generation_config: GenerationConfig) -> SamplingParams:
    """Its sampling parameters, else `SamplingParams()`."""
    asked = generation_config.to_diff_dict()
    defaults = {name: asked[name] for name in ("temperature", "top_k", "top_p", "min_p") if asked.get(name) is not None}
    if asked.get("do_sample") is False:
        defaults = {"temperature": 0.0}
    if asked.get("max_new_tokens") is not None:
        defaults["max_tokens"] = asked["max_new_tokens"]
    return SamplingParams(**defaults)


def eos_token_ids(generation_config: GenerationConfig, vocab_size: int) -> tuple[int, ...]:
    """All token ids that end a sequence in `model.generate`, without those outside the vocabulary."""
    ids = generation_config.eos_token_id
    ids = [] if ids is None else [ids] if isinstance(ids, int) else ids
    return tuple(token_id for token_id in ids if 0 <= token_id < vocab_size)


def not_honoured(generation_config: GenerationConfig, executor: str) -> tuple[str, ...]:
    """Notes on settings that an executor ignores."""
    asked = generation_config.to_diff_dict()
    honoured = SUPPRESSES if executor == "generate" else ()
    return tuple(
        f"generation_config has {name}={asked[name]!r}, which is not supported"
        for name in sorted((NOT_HONOURED & asked.keys()).difference(honoured))
    )


class WatchedWeights:
    """The version of a model's parameters, without references to the model or its memory.

    In-place changes through `parameter.data` are not detected: torch does not count them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._seen: list[tuple[weakref.ref[torch.nn.Parameter], tuple[torch.dtype, torch.device], int, int]] = []
        for parameter in model.parameters():
            with suppress(RuntimeError):  # torch counts no changes of tensors that were made in inference mode
                kind, version = (parameter.dtype, parameter.device), parameter._version
                self._seen.append((weakref.ref(parameter), kind, version, parameter.data_ptr()))

    @property
    def have_changed(self) -> bool:
        """Whether any parameter was written to or replaced. (One that was moved or converted has not changed.)"""
        for reference, kind, version, address in self._seen:
            parameter = reference()
            if parameter is None or (parameter.dtype, parameter.device) != kind:
                continue
            if parameter._version != version or parameter.data_ptr() != address:
                return True
        return False


CACHE_SHARE_OF_GPU = 0.9
"""Shares of a GPU's free memory, and of a host's memory, that the cache takes by default."""
PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ONE_AT_A_TIME = threading.Lock()
"""Held while `transformers` makes a model: it changes torch's default dtype for all threads meanwhile, and two threads
would restore each other's."""
ModelSource: TypeAlias = str | os.PathLike[str] | PreTrainedModel


def load_model(
    source: ModelSource,
    config: EngineConfig,
    *,
    model_config: PreTrainedConfig | None = None,
    in_own_dtype: bool = False,
    auto_class: type[Any] | None = None,
    spare: Sequence[str] = (),
) -> PreTrainedModel:
    """Load `source`, in evaluation mode, on the configured device, in the configured dtype.

    Args:
        model_config: from `read_config`, if the caller has it; it becomes the model's.
        in_own_dtype: whether a checkpoint's weights keep its dtype, and stay mapped.
        auto_class: the Auto class of `transformers` that finds the model's class; None: see `auto_class_of`.
        spare: name prefixes of unused weights, which a checkpoint may lack.

    A loaded `PreTrainedModel` is copied; the copy shares its parameters, and the caller's model is unchanged. Raises
    `ModelError` if the model cannot be loaded completely: missing weights are never initialised.
    """
    if isinstance(source, PreTrainedModel):
        return _own_copy(source, config)
    device = resolve_device(config.device)
    gguf, name = find_gguf(source, config.revision), os.path.expanduser(source)
    header = None if gguf is None else GgufHeader.read(gguf)
    model_config = model_config or read_config(source, config)
    auto_class = auto_class or auto_class_of(model_config)
    try:
        own_dtype = dtype_of_checkpoint(model_config)
        dtype = own_dtype if in_own_dtype else resolve_dtype(config.dtype, model_config, device)
        loaded_as = own_dtype if auto_class is AutoModelForMultimodalLM else dtype  # encoders are not read yet
        is_dummy = config.debug.load_format == "dummy"
        with ONE_AT_A_TIME, _bars_that_leave():
            if is_dummy:
                model = _dummy_model(model_config, loaded_as, device, config, auto_class)
            elif header is not None:
                model = load_gguf_model(header, model_config, loaded_as)
            else:
                model = _pretrained_model(name, model_config, loaded_as, device, config, auto_class, spare)
        model = model.to(device)
        is_quantised = not is_dummy and getattr(model_config, "quantization_config", None) is not None
        if is_quantised:
            for name, module in model.named_modules():
                if type(module) is torch.nn.Linear and module.weight.dtype not in PLAIN_DTYPES:
                    raise ModelError(
                        f"the quantised weights of {name} could not be read: they are {module.weight.dtype}"
                    )
        if is_quantised or loaded_as != dtype:
            convert(model, dtype)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"the model {name!r} cannot be loaded: {first_line(error)}") from error
    return model.eval()


def resolve_device(device: str) -> torch.device:
    """The torch device of this name; "auto": CUDA, else MPS, else the CPU. Raises `ModelError` if it does not exist."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        torch.empty(0, device=resolved)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {device!r} cannot be used here: {first_line(error)}") from error
    if resolved.type == "meta":
        raise ModelError("device 'meta' holds no values to compute with; use cpu, cuda or mps")
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else resolved


def resolve_dtype(dtype: str, model_config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """The dtype of this name; "auto": the checkpoint's, but on a CPU 16 bits become bfloat16 where that is fast, else
    float32."""
    if dtype != "auto":
        chosen: torch.dtype = getattr(torch, dtype)
        check_dtype(chosen, device)
        return chosen
    own = dtype_of_checkpoint(model_config)
    if device.type != "cpu":
        return own
    return torch.bfloat16 if own in (torch.bfloat16, torch.float16) and has_fast_bfloat16() else torch.float32


def dtype_of_checkpoint(model_config: PreTrainedConfig) -> torch.dtype:
    """A checkpoint's dtype by its configuration; float32 if unset."""
    own = getattr(model_config.get_text_config(), "dtype", None) or getattr(model_config, "dtype", None)
    return getattr(torch, own) if isinstance(own, str) else own or torch.float32


def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX512-BF16 or AMX)."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raise `ModelError` for float16 on a CPU, where its arithmetic is hundreds of times slower."""
    if dtype == torch.float16 and device.type == "cpu":
        raise ModelError("dtype float16 is unusably slow on a CPU; use float32, or bfloat16 where the CPU supports it")


def available_cache_memory(device: torch.device) -> int:
    """Bytes that keys and values may take by default: most of a GPU's free memory, a quarter of a host's."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0] * CACHE_SHARE_OF_GPU)
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() * CACHE_SHARE_OF_HOST)
    return int(usable_memory() * CACHE_SHARE_OF_HOST)


def own_tensors(model: PreTrainedModel, max_bytes: int | None = None) -> None:
    """Copy the parameters and buffers of `model`, which is exclusively ours, so that changes of a checkpoint's file, or
    of a caller's model, do not affect them. Those of encoders stay as they are.

    Args:
        max_bytes: larger ones are not copied; None: all are copied.
    """
    copies: dict[int, torch.Tensor] = {}
    unread = encoder_parameters(model)

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in unread or type(tensor) not in (torch.nn.Parameter, torch.nn.Buffer, torch.Tensor):
            return tensor  # it owns its memory, or knows how to read it
        if max_bytes is not None and tensor.numel() * tensor.element_size() > max_bytes:
            return tensor
        if id(tensor) not in copies:
            own = tensor.detach().clone()
            copies[id(tensor)] = torch.nn.Parameter(own, False) if isinstance(tensor, torch.nn.Parameter) else own
        return copies[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = copied(tensor)


def _own_copy(model: PreTrainedModel, config: EngineConfig) -> PreTrainedModel:
    """A copy with its own modules, buffers and configuration, independent of the caller's model.

    It shares the caller's parameters, unless the dtype or device changes. As in `from_pretrained`, buffers (rotary
    frequencies) and modules that the class keeps in float32 keep their dtype."""
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1 or "meta" in devices or len(getattr(model, "hf_device_map", None) or {}) > 1:
        raise ModelError(f"the model given is spread over {', '.join(sorted(devices))}; inflight runs it on one device")
    device = model.device if config.device == "auto" else resolve_device(config.device)
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    if dtype is None and model.dtype == torch.float16 and device.type == "cpu":
        dtype = torch.float32
    check_dtype(dtype or model.dtype, device)
    shares = not writes_to_its_weights(model)
    replaced: dict[int, torch.nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        converts = dtype is not None and parameter.is_floating_point() and not _stays_in_float32(model, name)
        wanted = dtype if converts else parameter.dtype
        is_same = parameter.dtype == wanted and parameter.device == device
        own = parameter.detach() if is_same and shares else parameter.detach().to(device, wanted, copy=True)
        replaced[id(parameter)] = torch.nn.Parameter(own, requires_grad=False)
    try:
        memo: dict[int, Any] = dict(replaced)
        own = copy.deepcopy(model, memo)
        for module in own.modules():
            for name, value in vars(module).items():
                if isinstance(value, FunctionType):
                    vars(module)[name] = _rebound(value, memo)
        return own.to(device).eval()
    except Exception as error:
        raise ModelError(f"the model given cannot be copied: {first_line(error)}; give its folder instead") from error


def writes_to_its_weights(model: PreTrainedModel) -> bool:
    """Whether a model's forward pass mutates its weights: RWKV's divides some, in place, on its first run."""
    return bool(getattr(model.config.get_text_config(), "rescale_every", 0))


def _rebound(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """Rebind a function to the copy. (`model.forward = timed(model.forward)` leaves a function that refers to the
    caller's model, and `deepcopy` does not copy functions.)

    Args:
        memo: `deepcopy`'s, with the copies of the caller's objects.
    """

    def of_the_copy(value: Any) -> Any:
        if isinstance(value, FunctionType):
            return _rebound(value, memo)
        if isinstance(value, MethodType) and id(value.__self__) in memo:
            return MethodType(of_the_copy(value.__func__), memo[id(value.__self__)])
        return memo.get(id(value), value) if isinstance(value, torch.nn.Module) else value

    cells = tuple(CellType(of_the_copy(cell.cell_contents)) for cell in function.__closure__ or ())
    own = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    own.__kwdefaults__ = function.__kwdefaults__
    own.__dict__.update({name: of_the_copy(value) for name, value in vars(function).items()})
    return own


def _dummy_model(
    model_config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    config: EngineConfig,
    auto_class: type[Any],
) -> PreTrainedModel:
    """A model with seeded random weights, made on the device."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(config.seed)
        return auto_class.from_config(model_config, dtype=dtype, trust_remote_code=config.trust_remote_code)


@contextmanager
def _bars_that_leave() -> Iterator[None]:
    """A context in which `transformers` draws progress bars on terminals only, and removes them when full."""

    def draw(bar: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return bar(*args, **{**options, "leave": False, "disable": options.get("disable") or not sys.stderr.isatty()})

    before = logging.set_tqdm_hook(draw)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def _pretrained_model(
    name: str,
    model_config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    config: EngineConfig,
    auto_class: type[Any],
    spare: Sequence[str],
) -> PreTrainedModel:
    quantized = load_quantized_model(name, model_config, dtype, device, config.revision)
    if quantized is not None:
        return quantized
    model, report = auto_class.from_pretrained(
        name,
        dtype=dtype,
        trust_remote_code=config.trust_remote_code,
        revision=config.revision,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # these are reported and refused below
    )
    missing = [key for key in report.get("missing_keys") or () if not key.startswith(tuple(spare))]
    refuse_incomplete({**report, "missing_keys": missing}, f"the checkpoint {name!r}")
    return model


def convert(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert all parameters to `dtype`, except encoders' and those that the class keeps in float32. (Where
    `transformers` cannot run a checkpoint's quantised layers, it turns them into plain ones in another dtype than the
    rest.)"""
    if any(parameter.dtype not in PLAIN_DTYPES for parameter in model.parameters()):
        return  # quantised layers that `transformers` runs
    unread = encoder_parameters(model)
    for name, parameter in model.named_parameters():
        if id(parameter) not in unread and not _stays_in_float32(model, name):
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype


def _stays_in_float32(model: PreTrainedModel, name: str) -> bool:
    """Whether a class keeps the parameter of this name in float32, whatever dtype the rest has."""
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(f".{each}." in f".{name}." for each in kept)
