"""`EngineConfig`: every choice about the engine that a caller can make. Plain data, checked when made."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from inflight.contracts.features import (
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
from inflight.contracts.options import (
    check_choice,
    check_integer,
    check_switch,
    is_text,
    refuse_unknown_options,
    strict_options,
)
from inflight.contracts.params import MAX_SEED

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "dummy")
TASKS = ("auto", "generate", "embed", "classify", "rerank")
"""What a model can be loaded for."""
POLICIES = ("fcfs", "priority")
QUANTIZATIONS = ("int8", "int4")
GROUP_SIZES = (32, 64, 128)
ARITHMETICS = ("auto", "fast", "exact")
KV_CACHE_DTYPES = ("auto", "int8")
SPECULATIONS = ("auto", "lookup", "grammar", "draft", "off")
MTP = "mtp"
"""As `draft_model`: the layer for multi-token prediction that the model's own checkpoint has."""
EXECUTORS = ("auto", "packed", "rows", "sequential")
ATTENTION_BACKENDS = ("auto", "reference", "torch", "cpu")
CACHE_SHARE_OF_HOST = 0.25
"""How much of a machine's memory keys and values may take by default."""
ROUTINGS = ("prefix", "least-loaded", "round-robin")
"""How one of several engines is chosen for a request; see `replicas.router`."""
MAX_RANKS = 64
"""Processes that may run a model together; `kernels/exchange.cpp` has the same number."""
NO_ADAPTERS = "this engine was made without adapters; with adapters={} they can be loaded later"
BACKGROUND = 2**31 - 1
"""The lowest priority. Whatever the policy, requests of it run in the background: in steps that no others need."""


@strict_options
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How a model is loaded and how its requests are batched.

    Attributes:
        dtype: of weights, activations and cache. "auto" is the checkpoint's own; but on a CPU a checkpoint of 16 bits
            runs in bfloat16 if the CPU has instructions for it (AVX512-BF16, AMX), else in float32. A loaded model
            keeps its own. With such instructions "bfloat16" is up to twice as fast as "float32", and not exact.
        num_threads: how many threads compute a step on a CPU, in each rank; None: as many as torch has
            (`OMP_NUM_THREADS`), but no more than there are physical cores that this process may use, or than a quota of
            CPU time (a container's) keeps running. Results do not depend on it.
        tensor_parallel_size: how many processes run the model together on a CPU, its *ranks*: each has a part of every
            weight and of the cache, on cores (`num_threads` of them) and, where there are several NUMA nodes, in memory
            of its own. Results are the same bits in any batch, but depend on this number as on a CPU: sums are added
            in another order. For models that `transformers` has a `tp_plan` for.
        device: "auto" (CUDA, else MPS, else CPU) or a torch device such as "cuda:1".
        load_format: "auto" reads the checkpoint's weights; "dummy" makes seeded random ones from the configuration.
        task: what the model is loaded for: "generate", or to make something of whole texts: "embed" (a vector),
            "classify" (a number for each label, or a score) or "rerank" (a score, as Qwen3-Reranker's: how likely the
            answer "yes" is). "auto" is what the checkpoint says of itself.
        trust_remote_code: whether Python code that comes with a checkpoint may run.
        revision: branch, tag or commit of a hub repository.
        executor: how the model is run: "packed" (all tokens of a step in one row), "rows" (batches of rows, with the
            model's own attention), "sequential" (one sequence after the other), or "auto" (the first of them that is
            proved exact). An executor that is asked for is proved, too.
        verify: whether to prove the model's exactness even if nothing has changed since a load that proved it. (What a
            load finds out is cached in `~/.cache/inflight`.)
        attention_backend: "reference" (the definition, slow), "torch" (any device), "cpu" (our kernels), or "auto" (the
            best here).
        kv_cache_dtype: of keys and values: "auto" (the model's) or "int8" (one scale for each token and head; half of
            bfloat16's memory; not exact; only with the "cpu" backend).
        quantization: None, or a way to round the weights of any checkpoint while it is loaded, on a CPU; not exact.
            "int8": weights with a scale for each output channel, activations with a scale for each row; a quarter of
            float32's memory. "int4": four bits and a scale for every 32 weights, head and embedding in eight;
            a seventh of float32's memory, and more for these two.
        quantization_group_size: of "int4": how many weights share a scale: 32, 64 or 128. Larger groups take less
            memory, and are less exact.
        quantization_minima: of "int4": whether these weights share a minimum, too, instead of being rounded around 0.
        quantization_arithmetic: of weights that are stored in groups of a few bits, by `quantization="int4"` or in the
            checkpoint. "exact": they are expanded to the model's dtype, and the results are those of the plain model
            with these weights; "fast": activations are rounded to int8, with a scale for every 32 inputs; "auto": fast
            where the CPU is faster so (AVX2, AVX-512), else exact.
        record_forward: whether the forward pass of a model that runs packed on a CPU is recorded once, and then runs
            without Python, with the same bits. Hooks that are put on its modules later are then never called.
        max_model_len: the most tokens of a sequence, prompt and output; None: what the model was made for.
        max_num_seqs: the most sequences that run at once: the number of slots.
        max_num_batched_tokens: the token budget of a step.
        max_prefill_tokens_per_step: how many tokens of a step may be prefill while other sequences decode, so that a
            long prompt does not stall them, or in the background; None: no limit offline; `AsyncLLM` derives one from
            measured speed.
        policy: "fcfs" (first come, first served) or "priority" (lower `priority` runs first, and may preempt).
        aging_steps: with "priority", steps after which a waiting request gains one priority.
        background_tokens_per_step: how many tokens of requests in the background (those of the lowest priority,
            2**31 - 1, and of batch jobs) a step may have beside others'; 0: they run only while no others do.
        speculation: the drafters, so that one step can give several tokens: "lookup" (what followed the
            same tokens before, in the sequence or in recent outputs), "grammar" (what structured output leaves no
            choice about), "draft" (`draft_model`), "auto" (all of them) or "off". Draft tokens are verified by choosing
            each token as ever, so results are the same, bit for bit; a model that cannot promise that does not
            speculate.
        draft_model: a small draft model with the same tokenizer: hub id or folder. It is loaded with the same
            options, and has a cache of its own with as many blocks, beside `kv_cache_memory`. "mtp" is the layer for
            multi-token prediction that some checkpoints have (DeepSeek-V3, GLM-4.5 and later, Mellum).
        max_draft_tokens: the most draft tokens of a sequence in a step.
        max_num_waiting: a request is refused while this many sequences wait, besides those in the background; None: no
            limit.
        enable_prefix_caching: whether blocks of the cache are found again by their content.
        prefix_cache_dir: a folder in which full blocks of the cache are kept, so that prefixes outlive the process and
            their eviction; several engines may share it. None: they are kept in memory only.
        prefix_cache_size: the bytes that all files in it may have.
        block_size: tokens in a block of the cache. Results are the same bits for all multiples of 16; other sizes are
            padded in memory, and add up attention's keys in another order.
        num_blocks: blocks in the cache; None: as many as `kv_cache_memory` holds. A sequence takes one for each
            `block_size` tokens, and in a model with sliding windows one in each cache group.
        kv_cache_memory: bytes for keys and values, of all ranks together; None: 90 % of what is free on a CUDA device,
            else up to a quarter of the machine's memory, which a CPU only touches as needed. Ignored if `num_blocks` is
            given.
        adapters: LoRA adapters that requests may ask for: by name, the folder or hub repository, as PEFT writes it. An
            empty dict: there are none yet, but they can be loaded later. None: there are none, and never will be.
        adapter_memory: the bytes that adapters may take in memory which no running sequence has; the least recently
            used ones are read from their files again.
        seed: for requests without a seed of their own, and for dummy weights.
    """

    dtype: str = "auto"
    num_threads: int | None = None
    tensor_parallel_size: int = 1
    device: str = "auto"
    load_format: str = "auto"
    task: str = "auto"
    trust_remote_code: bool = False
    revision: str | None = None
    executor: str = "auto"
    verify: bool = False
    attention_backend: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    quantization_group_size: int = 32
    quantization_minima: bool = False
    quantization_arithmetic: str = "auto"
    record_forward: bool = True
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_prefill_tokens_per_step: int | None = None
    policy: str = "fcfs"
    aging_steps: int = 100
    background_tokens_per_step: int = 0
    speculation: str = "auto"
    draft_model: str | None = None
    max_draft_tokens: int = 16
    max_num_waiting: int | None = None
    enable_prefix_caching: bool = True
    prefix_cache_dir: str | None = None
    prefix_cache_size: int = 20 * 2**30
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory: int | None = None
    adapters: Mapping[str, str] | None = None
    adapter_memory: int = 2**30
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.device, str):
            raise ValueError(f"device is {self.device!r}; it must be 'auto' or the name of a device, such as 'cuda:1'")
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("load_format", self.load_format, LOAD_FORMATS)
        check_choice("task", self.task, TASKS)
        check_choice("executor", self.executor, EXECUTORS)
        check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if self.quantization is not None:
            check_choice("quantization", self.quantization, QUANTIZATIONS)
        check_integer("quantization_group_size", self.quantization_group_size, 1)
        if self.quantization_group_size not in GROUP_SIZES:
            raise ValueError(f"quantization_group_size is {self.quantization_group_size}; it may be 32, 64 or 128")
        if self.quantization != "int4" and (self.quantization_group_size != GROUP_SIZES[0] or self.quantization_minima):
            raise ValueError("quantization_group_size and quantization_minima are of quantization 'int4'")
        check_choice("quantization_arithmetic", self.quantization_arithmetic, ARITHMETICS)
        if self.quantization == "int8" and self.quantization_arithmetic == "exact":
            raise ValueError("quantization 'int8' rounds activations: its arithmetic cannot be 'exact'")
        check_choice("policy", self.policy, POLICIES)
        check_choice("speculation", self.speculation, SPECULATIONS)
        self._check_draft_model()
        self._check_ranks()
        self._check_adapters()
        if not isinstance(self.prefix_cache_dir, str | None):
            raise ValueError(f"prefix_cache_dir is {self.prefix_cache_dir!r}; it must be a folder's name")
        if self.prefix_cache_dir is not None and not self.enable_prefix_caching:
            raise ValueError("there is a prefix_cache_dir, but enable_prefix_caching is False")
        optional = (
            "num_threads",
            "max_model_len",
            "num_blocks",
            "kv_cache_memory",
            "max_prefill_tokens_per_step",
            "max_num_waiting",
        )
        for name in optional:
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        positive = ("max_num_seqs", "max_num_batched_tokens", "aging_steps", "block_size", "max_draft_tokens")
        for name in (*positive, "prefix_cache_size", "adapter_memory"):
            check_integer(name, getattr(self, name), 1)
        check_integer("background_tokens_per_step", self.background_tokens_per_step, 0)
        check_integer("seed", self.seed, 0, MAX_SEED)
        switches = (
            "trust_remote_code",
            "enable_prefix_caching",
            "verify",
            "quantization_minima",
            "record_forward",
        )
        for name in switches:
            check_switch(name, getattr(self, name))

    def asked_features(self) -> dict[str, bool]:
        """Which features the options ask for."""
        return {
            ADAPTERS: self.adapters is not None,
            DRAFT_MODEL: self.draft_model is not None,
            PREFIX_STORE: self.prefix_cache_dir is not None,
            RANKS: self.tensor_parallel_size > 1,
            QUANTIZATION: self.quantization is not None,
            CACHE_DTYPE: self.kv_cache_dtype != "auto",
            OTHER_EXECUTORS: self.executor in ("rows", "sequential"),
            GPU: self.device not in ("auto", "cpu"),
        }

    def _check_ranks(self) -> None:
        check_integer("tensor_parallel_size", self.tensor_parallel_size, 1, MAX_RANKS)
        Features(num_ranks=self.tensor_parallel_size).require_all(self.asked_features())

    def _check_adapters(self) -> None:
        if self.adapters is None:
            return
        if not isinstance(self.adapters, Mapping):
            raise ValueError(f"adapters is {self.adapters!r}; it must be a dict of names and folders")
        for name, source in self.adapters.items():
            check_adapter(name, source)

    def _check_draft_model(self) -> None:
        if self.draft_model is None:
            if self.speculation == "draft":
                raise ValueError("speculation is 'draft', but there is no draft_model")
            return
        if not isinstance(self.draft_model, str) or not self.draft_model:
            given = (
                repr(self.draft_model)
                if isinstance(self.draft_model, str | int)
                else f"a {type(self.draft_model).__name__}"
            )
            raise ValueError(f"draft_model is {given}; it must be a hub id, a folder, or 'mtp'")
        if self.speculation not in ("auto", "draft"):
            raise ValueError(f"there is a draft_model, but speculation is {self.speculation!r}")


def check_adapter(name: object, source: object) -> None:
    """Raise `ValueError` unless an adapter has a name, and its source is one, too."""
    if not isinstance(name, str) or not is_text(name) or not name.strip():
        raise ValueError(f"the name of an adapter is {name!r}; it must be text that is not empty")
    if not isinstance(source, str) or not source:
        raise ValueError(f"the adapter {name!r} is {source!r}; it must be a folder's name or a hub id")


def engine_config(options: Mapping[str, Any], owner: str) -> EngineConfig:
    """A front's options as a configuration. Raises `ValueError` if one is unknown or out of range."""
    refuse_unknown_options(options, [field.name for field in fields(EngineConfig)], owner)
    options = dict(options)
    for name in ("dtype", "device"):  # torch.bfloat16 and torch.device("cuda") are accepted, too
        if type(options.get(name)).__module__ == "torch":
            options[name] = str(options[name]).removeprefix("torch.")
    for name in ("draft_model", "prefix_cache_dir"):
        if isinstance(options.get(name), str | os.PathLike):
            options[name] = os.path.expanduser(os.fspath(options[name]))
    if isinstance(options.get("adapters"), Mapping):
        options["adapters"] = {
            name: full_source(source) if isinstance(source, str | os.PathLike) else source
            for name, source in options["adapters"].items()
        }
    return EngineConfig(**options)


def full_source(source: str | os.PathLike[str]) -> str:
    """A hub id as it is; a folder as an absolute path: another process, or a later one, may be in another folder."""
    folder = os.path.expanduser(os.fspath(source))
    return os.path.abspath(folder) if os.path.isdir(folder) else folder
