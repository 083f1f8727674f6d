"""`EngineConfig`: every choice about the engine that a caller can make. Plain data, checked when made.

Options stand in groups, such as `KVCacheConfig`. Each can also be given flat, by a name of its own:
`EngineConfig(kv_cache=KVCacheConfig(dtype="int8"))` is `EngineConfig(kv_cache_dtype="int8")`.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar, get_args

from msgspec import Meta

from inflight.contracts.api.features import (
    ADAPTERS,
    CACHE_DTYPE,
    DRAFT_MODEL,
    GPU,
    OTHER_EXECUTORS,
    PREFIX_STORE,
    QUANTIZATION,
    RANKS,
    Features,
)
from inflight.contracts.api.options import (
    NotNegative,
    Positive,
    Seconds,
    check,
    flat_values,
    is_text,
    option_names,
    refuse_unknown_options,
    strict_options,
)
from inflight.contracts.api.params import MAX_SEED
from inflight.contracts.api.watching import KVEvents
from inflight.contracts.step.record import RecordTo

GROUP_SIZES = (32, 64, 128)
MTP = "mtp"
"""As `draft_model`: the layer for multi-token prediction that the model's own checkpoint has."""
CACHE_SHARE_OF_HOST = 0.25
"""How much of a machine's memory keys and values may take by default."""
Routing: TypeAlias = Literal["prefix", "least-loaded", "round-robin"]
"""How one of several engines is chosen for a request; see `engine.replicas.router`."""
ROUTINGS: tuple[str, ...] = get_args(Routing)
RESTART_DELAYS = (0.5, 1.0)
"""Seconds between a crash and the next start, for each crash in a row. After one more crash the engine is given up."""
MAX_RANKS = 64
"""Processes that may run a model together; `kernels/exchange.cpp` has the same number."""
NO_ADAPTERS = "this engine was made without adapters; with adapters={} they can be loaded later"
BACKGROUND = 2**31 - 1
"""The lowest priority. Whatever the policy, requests of it run in the background: in steps that no others need."""
_Limits: TypeAlias = Annotated[
    dict[Literal["image", "audio", "video"], NotNegative], Meta(description='a dict such as {"image": 4, "audio": 1}')
]

T = TypeVar("T")


def _flat(name: str, default: T) -> T:
    """A field that has another name where options are not nested."""
    return field(default=default, metadata={"flat": name})


@strict_options
@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """How weights are rounded while they are loaded, on a CPU.

    Attributes:
        method: None, or a way to round the weights of any checkpoint while it is loaded; not exact.
            "int8": weights with a scale for each output channel, activations with a scale for each row; a quarter of
            float32's memory. "int4": four bits and a scale for every 32 weights, head and embedding in eight;
            a seventh of float32's memory, and more for these two.
        group_size: of "int4": how many weights share a scale: 32, 64 or 128. Larger groups take less
            memory, and are less exact.
        minima: of "int4": whether these weights share a minimum, too, instead of being rounded around 0.
        arithmetic: of weights that are stored in groups of a few bits, by `quantization="int4"` or in the
            checkpoint. "exact": they are expanded to the model's dtype, and the results are those of the plain model
            with these weights; "fast": activations are rounded to int8, with a scale for every 32 inputs; "auto": fast
            where the CPU is faster so (AVX2, AVX-512), else exact.

    Raises:
        ValueError: an option is unknown, out of range, or does not go with another.
    """

    method: Literal["int8", "int4"] | None = _flat("quantization", None)
    group_size: Literal[32, 64, 128] = _flat("quantization_group_size", 32)
    minima: bool = _flat("quantization_minima", False)
    arithmetic: Literal["auto", "fast", "exact"] = _flat("quantization_arithmetic", "auto")

    def __post_init__(self) -> None:
        if self.method != "int4" and (self.group_size != GROUP_SIZES[0] or self.minima):
            raise ValueError("quantization_group_size and quantization_minima are of quantization 'int4'")
        if self.method == "int8" and self.arithmetic == "exact":
            raise ValueError("quantization 'int8' rounds activations: its arithmetic cannot be 'exact'")


@strict_options
@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig:
    """The paged cache of keys and values.

    Attributes:
        block_size: tokens in a block of the cache. Results are the same bits for all multiples of 16; other sizes are
            padded in memory, and add up attention's keys in another order.
        num_blocks: blocks in the cache; None: as many as `kv_cache_memory` holds. A sequence takes one for each
            `block_size` tokens, and in a model with sliding windows one in each cache group.
        memory: bytes for keys and values, of all ranks together; None: 90 % of what is free on a CUDA device,
            else up to a quarter of the machine's memory, which a CPU only touches as needed. Ignored if `num_blocks` is
            given.
        dtype: of keys and values: "auto" (the model's), "int8" or "int4" (half of bfloat16's memory, or a little more
            than a quarter, with one scale for each token and head; not exact; only with the "cpu" backend).

    Raises:
        ValueError: an option is unknown, out of range, or does not go with another.
    """

    block_size: Positive = 16
    num_blocks: Positive | None = None
    memory: Positive | None = _flat("kv_cache_memory", None)
    dtype: Literal["auto", "int8", "int4"] = _flat("kv_cache_dtype", "auto")


@strict_options
@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheConfig:
    """Which blocks of the cache later requests find again.

    Attributes:
        enabled: whether blocks of the cache are found again by their content.
        folder: a folder in which full blocks of the cache are kept, so that prefixes outlive the process and
            their eviction; several engines may share it. None: they are kept in memory only.
        size: the bytes that all files in it may have.
        retention: the most seconds for which blocks of a session (requests whose prompts continue each other) are kept
            for its next request, while others wait for them (at most as long, or eight times as long as computing them
            takes); 0: cached blocks are evicted by recency alone.

    Raises:
        ValueError: an option is unknown, out of range, or does not go with another.
    """

    enabled: bool = _flat("enable_prefix_caching", True)
    folder: Annotated[str, Meta(description="a folder's name")] | None = _flat("prefix_cache_dir", None)
    size: Positive = _flat("prefix_cache_size", 20 * 2**30)
    retention: Annotated[float, Meta(ge=0, le=86400)] = _flat("prefix_retention", 300.0)

    def __post_init__(self) -> None:
        if self.folder is not None and not self.enabled:
            raise ValueError("there is a prefix_cache_dir, but enable_prefix_caching is False")
        if self.folder is not None:
            object.__setattr__(self, "folder", os.path.expanduser(self.folder))


@strict_options
@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingConfig:
    """Which tokens a step has.

    Attributes:
        max_num_seqs: the most sequences that run at once: the number of slots.
        max_num_batched_tokens: the token budget of a step.
        max_prefill_tokens_per_step: how many tokens of a step may be prefill while other sequences decode, so that a
            long prompt does not stall them, or in the background; None: no limit offline; `AsyncLLM` derives one from
            measured speed.
        policy: "fcfs" (first come, first served) or "priority" (lower `priority` runs first, and may preempt).
        aging_steps: with "priority", steps after which a waiting request gains one priority.
        background_tokens_per_step: how many tokens of requests in the background (those of the lowest priority,
            2**31 - 1, and of batch jobs) a step may have beside others'; 0: they run only while no others do.
        max_num_waiting: a request is refused while this many sequences wait, besides those in the background; None: no
            limit.

    Raises:
        ValueError: an option is unknown, out of range, or does not go with another.
    """

    max_num_seqs: Positive = 64
    max_num_batched_tokens: Positive = 2048
    max_prefill_tokens_per_step: Positive | None = None
    policy: Literal["fcfs", "priority"] = "fcfs"
    aging_steps: Positive = 100
    background_tokens_per_step: NotNegative = 0
    max_num_waiting: Positive | None = None


@strict_options
@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """How draft tokens are proposed.

    Attributes:
        method: the drafters, so that one step can give several tokens: "lookup" (what followed the same tokens before,
            in the sequence or in recent outputs), "grammar" (what structured output leaves no choice about), "draft"
            (`draft_model`), "auto" (all of them) or "off". Draft tokens are verified by choosing each token as ever, so
            results are the same, bit for bit; a model that cannot promise that does not speculate.
        draft_model: a small draft model with the same tokenizer: hub id or folder. It is loaded with the same
            options, and has a cache of its own with as many blocks, beside `kv_cache_memory`. "mtp" is the layer for
            multi-token prediction that some checkpoints have (DeepSeek-V3, GLM-4.5 and later, Mellum).
        max_draft_tokens: the most draft tokens of a sequence in a step.

    Raises:
        ValueError: an option is unknown, out of range, or does not go with another.
    """

    method: Literal["auto", "lookup", "grammar", "draft", "off"] = _flat("speculation", "auto")
    draft_model: Annotated[str, Meta(min_length=1, description="a hub id, a folder, or 'mtp'")] | None = None
    max_draft_tokens: Positive = 16

    def __post_init__(self) -> None:
        if self.draft_model is None:
            if self.method == "draft":
                raise ValueError("speculation is 'draft', but there is no draft_model")
        elif self.method not in ("auto", "draft"):
            raise ValueError(f"there is a draft_model, but speculation is {self.method!r}")
        else:
            object.__setattr__(self, "draft_model", os.path.expanduser(self.draft_model))


@strict_options
@dataclass(frozen=True, slots=True, kw_only=True)
class DebugConfig:
    """Choices that only developers make.

    Attributes:
        executor: how the model is run: "packed" (all tokens of a step in one row), "rows" (batches of rows, with the
            model's own attention), "sequential" (one sequence after the other), or "auto" (the first of them that is
            proved exact). An executor that is asked for is proved, too. "generate" leaves every sequence to the model's
            own `generate`; with "auto", only encoder-decoders and multimodal models that run in no other way do.
        attention_backend: "reference" (the definition, slow), "torch" (any device), "cpu" (our kernels), or "auto" (the
            best here).
        record_forward: whether the forward pass of a model that runs packed on a CPU is recorded once, and then runs
            without Python, with the same bits. Hooks that are put on its modules later are then never called.
        verify: whether to prove the model's exactness even if nothing has changed since a load that proved it. (What a
            load finds out is cached in `~/.cache/inflight`.)
        load_format: "auto" reads the checkpoint's weights; "dummy" makes seeded random ones from the configuration.

    Raises:
        ValueError: an option is unknown, out of range, or does not go with another.
    """

    executor: Literal["auto", "packed", "rows", "sequential", "generate"] = "auto"
    attention_backend: Literal["auto", "reference", "torch", "cpu"] = "auto"
    record_forward: bool = True
    verify: bool = False
    load_format: Literal["auto", "dummy"] = "auto"


@strict_options
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How a model is loaded and how its requests are batched.

    Attributes:
        dtype: of weights, activations and cache. "auto" is the checkpoint's own; but on a CPU a checkpoint of 16 bits
            runs in bfloat16 if the CPU has instructions for it (AVX512-BF16, AMX), else in float32. A loaded model
            keeps its own. With such instructions "bfloat16" is up to twice as fast as "float32", and not exact.
        device: "auto" (CUDA, else MPS, else CPU) or a torch device such as "cuda:1".
        num_threads: how many threads compute a step on a CPU, in each rank; None: as many as torch has
            (`OMP_NUM_THREADS`), but no more than there are physical cores that this process may use, or than a quota of
            CPU time (a container's) keeps running. Results do not depend on it.
        tensor_parallel_size: how many processes run the model together on a CPU, its *ranks*: each has a part of every
            weight and of the cache, on cores (`num_threads` of them) and, where there are several NUMA nodes, in memory
            of its own. Results are the same bits in any batch, but depend on this number as on a CPU: sums are added
            in another order. For models that `transformers` has a `tp_plan` for.
        task: what the model is loaded for: "generate", or to make something of whole texts: "embed" (a vector),
            "classify" (a number for each label, or a score) or "rerank" (a score, as Qwen3-Reranker's: how likely the
            answer "yes" is). "auto" is what the checkpoint says of itself.
        trust_remote_code: whether Python code that comes with a checkpoint may run.
        revision: branch, tag or commit of a hub repository.
        max_model_len: the most tokens of a sequence, prompt and output; None: what the model was made for.
        limit_mm_per_prompt: the most items of a prompt by kind, as `{"image": 4, "audio": 1}`; None: no limit.
        seed: for requests without a seed of their own, and for dummy weights.
        adapters: LoRA adapters that requests may ask for: by name, the folder or hub repository, as PEFT writes it. An
            empty dict: there are none yet, but they can be loaded later. None: there are none, and never will be.
        adapter_memory: the bytes that adapters may take in memory which no running sequence has; the least recently
            used ones are read from their files again.
        quantization: rounding of weights at load. This group, like the others, may be a dict, and its options flat.
        kv_cache: blocks and dtype of keys and values.
        prefix_cache: reuse of cached blocks, in memory and on disk.
        scheduling: limits of a step, and the order of requests.
        speculation: draft tokens.
        debug: for developers.

    Raises:
        ValueError: an option is unknown, out of range, or does not go with another.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Annotated[str, Meta(description="'auto' or the name of a device, such as 'cuda:1'")] = "auto"
    num_threads: Positive | None = None
    tensor_parallel_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    task: Literal["auto", "generate", "embed", "classify", "rerank"] = "auto"
    trust_remote_code: bool = False
    revision: str | None = None
    max_model_len: Positive | None = None
    limit_mm_per_prompt: Mapping[str, int] | None = None
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] = 0
    adapters: Mapping[str, str] | None = None
    adapter_memory: Positive = 2**30
    quantization: QuantizationConfig = QuantizationConfig()
    kv_cache: KVCacheConfig = KVCacheConfig()
    prefix_cache: PrefixCacheConfig = PrefixCacheConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    debug: DebugConfig = DebugConfig()

    if TYPE_CHECKING:

        def __init__(self, **options: Any) -> None:
            """Nested or flat."""

    def __post_init__(self) -> None:
        Features(num_ranks=self.tensor_parallel_size).require_all(self.asked_features())
        check("limit_mm_per_prompt", self.limit_mm_per_prompt, _Limits | None)
        if self.adapters is None:
            return
        if not isinstance(self.adapters, Mapping):
            raise ValueError(f"adapters is {self.adapters!r}; it must be a dict of names and folders")
        for name, source in self.adapters.items():
            check_adapter(name, source)
        object.__setattr__(self, "adapters", {name: full_source(source) for name, source in self.adapters.items()})

    def replace(self, **options: Any) -> "EngineConfig":
        """The same with other options: flat, or whole groups."""
        return EngineConfig(**flat_values(self, but=options) | options)

    def asked_features(self) -> dict[str, bool]:
        """Which features the options ask for."""
        return {
            ADAPTERS: self.adapters is not None,
            DRAFT_MODEL: self.speculation.draft_model is not None,
            PREFIX_STORE: self.prefix_cache.folder is not None,
            RANKS: self.tensor_parallel_size > 1,
            QUANTIZATION: self.quantization.method is not None,
            CACHE_DTYPE: self.kv_cache.dtype != "auto",
            OTHER_EXECUTORS: self.debug.executor not in ("auto", "packed"),
            GPU: self.device not in ("auto", "cpu"),
        }


@strict_options
@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Where the engines of an `AsyncLLM` run, when they are restarted, and what is told of their steps.

    Attributes:
        in_process: run the engine in a thread of this process instead of its own process. `model` and `tokenizer` may
            then be loaded objects, as for `LLM`.
        starts_at_once: start the engine's process now, while the front loads, instead of with the first call.
        restart_delays: seconds before each restart, for each tolerated crash in a row. After one more, every call
            raises `EngineGivenUpError` until `stop()` is called.
        step_timeout: seconds of silence after which an engine's process is killed, and counts as crashed; None: never.
            Long steps get more: 50 times the longest so far.
        record_to: where to record every step, for `inflight trace` and `simulate`; None: nowhere. Each replica has its
            own file.
        kv_events: where to publish events of the prefix cache, as vLLM does (needs pyzmq); None: nowhere. Replicas have
            consecutive ports.
        replicas: number of engines, each with the whole model, on its own cores; "auto": one per NUMA node. Options
            apply to each engine; `kv_cache_memory`, unless given, is divided among them.
        routing: how requests are routed to replicas: "prefix" (shortest expected time to first token), "least-loaded"
            or "round-robin".

    Raises:
        ValueError: an option is unknown, out of range, or does not go with another.
    """

    in_process: bool = False
    starts_at_once: bool = False
    restart_delays: Sequence[float] = RESTART_DELAYS
    step_timeout: Seconds | None = 60.0
    record_to: RecordTo | None = None
    kv_events: KVEvents | None = None
    replicas: int | Literal["auto"] = 1
    routing: Routing = "prefix"

    def __post_init__(self) -> None:
        if self.kv_events is not None and find_spec("zmq") is None:
            raise ValueError("kv_events need pyzmq: pip install 'inflight-llm[kv-events]'")


def front_options(options: Mapping[str, Any], owner: str) -> tuple[FleetConfig, EngineConfig]:
    """The options of `AsyncLLM`, divided. Raises `ValueError` if one is unknown or out of range."""
    of_fleet = option_names(FleetConfig)
    refuse_unknown_options(options, of_fleet | option_names(EngineConfig), owner)
    fleet = {name: value for name, value in options.items() if name in of_fleet}
    return FleetConfig(**fleet), EngineConfig(**{name: options[name] for name in options if name not in of_fleet})


def engine_config(options: Mapping[str, Any], owner: str) -> EngineConfig:
    """A front's options as a configuration. Raises `ValueError` if one is unknown or out of range."""
    refuse_unknown_options(options, option_names(EngineConfig), owner)
    return EngineConfig(**options)


def check_adapter(name: object, source: object) -> None:
    """Raise `ValueError` unless an adapter has a name, and its source is one, too."""
    if not isinstance(name, str) or not is_text(name) or not name.strip():
        raise ValueError(f"the name of an adapter is {name!r}; it must be text that is not empty")
    if not isinstance(source, str | os.PathLike) or not os.fspath(source):
        raise ValueError(f"the adapter {name!r} is {source!r}; it must be a folder's name or a hub id")


def full_source(source: str | os.PathLike[str]) -> str:
    """A hub id as it is; a folder as an absolute path: another process, or a later one, may be in another folder."""
    folder = os.path.expanduser(os.fspath(source))
    return os.path.abspath(folder) if os.path.isdir(folder) else folder
