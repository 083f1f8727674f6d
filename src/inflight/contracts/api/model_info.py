"""`ModelInfo`: facts about a model found at load, and how it runs. Plain data."""

from dataclasses import dataclass

from inflight.contracts.api.errors import InvalidRequestError
from inflight.contracts.api.pooling import PoolingPlan
from inflight.contracts.step.cache_layout import CacheGroup


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The weights of a model that are stored in the same way.

    Attributes:
        kind: a dtype, or the name of a format's type, such as "Q4_K".
        number: number of weights; fused layers count as one.
        num_bytes: of all of them.
    """

    kind: str
    number: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The results of a model's preparation.

    Attributes:
        checkpoint_dtype, dtype: of the checkpoint (or loaded model), and of the running model.
        executor: how the model is run: "packed", "rows" or "sequential", proved exact, or by its own "generate".
        proved_on: the model itself, or a proxy: a small float32 copy of its class.
        quantization: how its weights were rounded while it was loaded: "int8", "int4", or None.
        logits_error, attention_error: the proof's relative errors against the plain model; `attention_error` is None
            where attention is the model's own.
        attention_calls: each kind of attention call of a forward pass, as "28 x 16 heads over 8 key/value heads …"; of
            one rank.
        is_batch_invariant: whether a sequence's logits were the same bits alone, in a batch and in chunks.
        max_model_len: the most tokens that a sequence can have.
        recompute_beyond: a sequence that grows past this length is recomputed (LongRoPE); None: no such length.
        can_share_prefixes: whether a sequence can reuse another's blocks (prefix cache, forks).
        can_resume: otherwise, whether it can go on from the state of an ended one, in that one's slot.
        cache_groups: which tokens of a sequence each group of layers keeps.
        max_cached_len: the longest sequence that the cache has room for.
        kv_bytes_per_token: cache memory of one token in all layers.
        kv_bytes_per_lasting_token: cache memory of one token outside all windows.
        state_bytes: memory of a sequence's recurrent states, whatever its length; 0: it has none.
        num_states: how many of them the cache has: two for each sequence that runs, and checkpoints of prefixes; 0: the
            model has none, or keeps them by slot.
        eos_token_ids: tokens that end a sequence.
        eos_named_by: what names each of them: "configuration", "tokenizer", "chat template", a key of a GGUF file, or
            several of these.
        notes: limits and ignored settings, with reasons.
        arithmetic: how weights of a few bits are multiplied: "fast" or "exact"; None: there are none.
        weights: storage formats of the weights, the largest share first.
        is_recorded: whether the forward pass was recorded, and runs without Python.
        num_threads: how many threads compute a step, in each rank.
        num_ranks: how many processes run the model together (`tensor_parallel_size`).
        kernels: which C++ kernels run: "native", built for this CPU; the target of the wheel's ("avx2", "amx", …); or
            None: torch's.
        speculation: the drafters; or "off", and why, if speculation was asked for.
        pooling: how it pools; None: it generates.
        input_modalities: what a prompt may have besides text: "image", "audio".
        needs_item: whether each prompt must have one of these, because the encoder reads nothing else (Whisper).
    """

    model_class: str
    num_parameters: int
    checkpoint_dtype: str
    dtype: str
    device: str
    executor: str
    proved_on: str
    attention_backend: str
    quantization: str | None
    attention_calls: tuple[str, ...]
    logits_error: float
    attention_error: float | None
    is_batch_invariant: bool
    vocab_size: int
    max_model_len: int
    recompute_beyond: int | None
    can_share_prefixes: bool
    block_size: int
    num_blocks: int
    cache_groups: tuple[CacheGroup, ...]
    max_cached_len: int
    kv_bytes_per_token: int
    kv_bytes_per_lasting_token: int
    eos_token_ids: tuple[int, ...]
    notes: tuple[str, ...]
    arithmetic: str | None = None
    weights: tuple[StoredWeights, ...] = ()
    is_recorded: bool = False
    num_threads: int = 1
    num_ranks: int = 1
    kernels: str | None = None
    speculation: str = "off"
    pooling: PoolingPlan | None = None
    eos_named_by: tuple[str, ...] = ()
    can_resume: bool = False
    state_bytes: int = 0
    num_states: int = 0
    input_modalities: tuple[str, ...] = ()
    needs_item: bool = False

    @property
    def forward_pass(self) -> str:
        """ "recorded", or "in Python"."""
        return "recorded" if self.is_recorded else "in Python"

    @property
    def threads(self) -> str:
        """The number in words: "2 threads", or "2 ranks of 1 thread"."""
        threads = f"{self.num_threads} thread{'s' if self.num_threads != 1 else ''}"
        return threads if self.num_ranks == 1 else f"{self.num_ranks} ranks of {threads}"

    def summary(self) -> str:
        """One line of what an operator wants to know."""
        num_tokens = self.num_blocks * self.block_size // len(self.cache_groups)
        options = [
            f"{self.model_class}, {self.num_parameters / 1e6:,.1f} million parameters, {self.dtype} on {self.device}",
            self.threads,
            f"executor {self.executor}, attention {self.attention_backend}, forward pass {self.forward_pass}",
            *([] if self.quantization is None else [self.quantization]),
            f"context {self.max_model_len} tokens",
            f"cache {num_tokens} tokens, {num_tokens * self.kv_bytes_per_token / 1e6:,.0f} MB"
            if self.pooling is None
            else f"task {self.pooling.task}",
        ]
        return "; ".join(options)


def refusal_to_generate(info: ModelInfo) -> InvalidRequestError:
    """The refusal of generation by a pooling model."""
    assert info.pooling is not None
    return InvalidRequestError(f"{info.model_class} was loaded to {info.pooling.task}; it does not generate text")
