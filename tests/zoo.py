"""The zoo: tiny models of many architectures, sensitive by construction.

A default-initialised tiny model mostly repeats its input token: it passes an "exactness" test even with its attention
switched off. So every model here is drawn with larger matrices (a factor per architecture, `FACTORS`) until its next
token depends on the far context. `sensitivity` measures that: it breaks the attention mask on purpose and counts the
argmaxes that notice. The broken attention is a function registered with transformers (`MUTANT`) which runs several
sequences packed into one row; with the correct mask it reproduces the plain model, and so proves itself.

This module knows transformers and torch, and nothing of the engine that is tested with it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

VOCAB_SIZE = 256
WINDOW = 12
SLIDING, FULL = "sliding_attention", "full_attention"
ORIGINAL_MAX_POSITIONS = 64  # LongRoPE changes its factors beyond this many positions

# Drawn once per model for all measurements. All lengths exceed ORIGINAL_MAX_POSITIONS: LongRoPE chooses its factors
# from the largest position of the whole row, so a row that mixes both regimes differs from the plain model.
SEQUENCE_LENGTHS = (70, 82, 76)
NUM_GREEDY_TOKENS = 60

FACTOR_LADDER = (4, 6, 8, 12, 16, 24, 32, 48)  # below 4, some classes have sensitive attention but insensitive experts
FAR = 32  # positions from here on have a far context: a block of 16 tokens that can be lost, and 16 more before it
BASE_STD = 0.02  # what a factor multiplies: the usual initializer_range
QUERY_KEY_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")


def _config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """A tiny config: `changes` on top of the options that have the same name in every class."""
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return AutoConfig.for_model(model_type, **(common | changes))


def _gqa_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """A tiny config of a class in which two query heads share a key and value head, as in most models since Llama 2."""
    common = {"intermediate_size": 96, "num_key_value_heads": 2, "attention_dropout": 0.0}
    return _config(model_type, **(common | changes))


def _gemma(model_type: str, **changes: Any) -> PreTrainedConfig:
    # query_pre_attn_scalar is not the head size: the scale of the scores has to be taken from the module.
    return _gqa_config(model_type, head_dim=16, query_pre_attn_scalar=8, sliding_window=WINDOW, **changes)


def _phi3_longrope() -> PreTrainedConfig:
    original = {"original_max_position_embeddings": ORIGINAL_MAX_POSITIONS}
    factors = {"short_factor": [1.0 + 0.05 * i for i in range(8)], "long_factor": [1.0 + 0.5 * i for i in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0}
    return _gqa_config("phi3", rope_parameters=rope | factors | original, **original)


def _gpt_oss() -> PreTrainedConfig:
    original = {"original_max_position_embeddings": ORIGINAL_MAX_POSITIONS}
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "truncate": False}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    layers = {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL, SLIDING]}
    return _gqa_config("gpt_oss", head_dim=16, rope_parameters=rope | original, **layers, **experts)


def _deepseek_v3() -> PreTrainedConfig:
    heads = {"num_key_value_heads": 4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    ranks = {"q_lora_rank": 24, "kv_lora_rank": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
    layers = {"first_k_dense_replace": 1, "moe_intermediate_size": 32, "num_mtp_layers": 0}
    return _gqa_config("deepseek_v3", **heads, **ranks, **experts, **layers)


ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt2": lambda: _config("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "opt": lambda: _config("opt", ffn_dim=96, word_embed_proj_dim=64, dropout=0.0, attention_dropout=0.0),
    "llama": lambda: _gqa_config("llama"),
    "mistral": lambda: _gqa_config("mistral", sliding_window=WINDOW),
    "qwen2": lambda: _gqa_config("qwen2"),
    "qwen3": lambda: _gqa_config("qwen3", head_dim=16),
    "gemma2": lambda: _gemma(
        "gemma2",
        num_hidden_layers=4,
        layer_types=[SLIDING, FULL, SLIDING, FULL],
        attn_logit_softcapping=6.0,
        final_logit_softcapping=0.5,
    ),
    "gemma3": lambda: _gemma("gemma3_text", layer_types=[SLIDING, FULL, SLIDING]),
    "phi3": lambda: _gqa_config("phi3"),
    "phi3_longrope": _phi3_longrope,
    "gpt_neox": lambda: _config("gpt_neox", intermediate_size=96, hidden_dropout=0.0, attention_dropout=0.0),
    "mixtral": lambda: _gqa_config("mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen3_moe": lambda: _gqa_config(
        "qwen3_moe", head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
    "olmo2": lambda: _gqa_config("olmo2"),
    "stablelm": lambda: _gqa_config("stablelm", use_qkv_bias=True, qk_layernorm=True, hidden_dropout=0.0),
}

# Found by find_factor. If one factor is not enough for a class, draw() handles some kinds of parameters separately
# (norms of queries and keys, sinks), and the configs above set the rest (Gemma's scale and caps).
FACTORS: dict[str, float] = {
    "gpt2": 24,
    "opt": 16,
    "llama": 8,
    "mistral": 16,
    "qwen2": 8,
    "qwen3": 4,
    "gemma2": 8,
    "gemma3": 4,
    "phi3": 8,
    "phi3_longrope": 6,
    "gpt_neox": 16,
    "mixtral": 8,
    "qwen3_moe": 4,
    "gpt_oss": 8,
    "deepseek_v3": 8,
    "olmo2": 4,
    "stablelm": 4,
}


@cache
def build(name: str, seed: int = 0) -> PreTrainedModel:
    """The sensitive model of an architecture: float32, eval mode, eager attention, the same bits for the same seed.

    All callers get the same object. Code that changes a model (by prepacking it, for example) uses `draw` or a copy.
    """
    return draw(name, FACTORS[name], seed)


def draw(name: str, factor: float, seed: int) -> PreTrainedModel:
    """A model of an architecture with its weights drawn from `seed`; matrices get a deviation of `factor * BASE_STD`.

    Everything is drawn here, in the order of the parameters' names, rather than rescaled, so the weights do not depend
    on how and in which order a version of transformers initialises them. Embeddings keep the base deviation, because
    with scaled embeddings the residual stream would still be mostly the input token. Norms and biases are moved away
    from 1 and 0, so that forgetting one is noticed.
    """
    with torch.random.fork_rng(devices=[]):  # construction draws, too: the caller's state must not change
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            ARCHITECTURES[name](), dtype=torch.float32, attn_implementation="eager"
        ).eval()
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    buffers = [(key, buffer) for key, buffer in model.named_buffers() if key.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for key, weight in sorted([*model.named_parameters(), *buffers]):
            noise = torch.randn(weight.shape, generator=generator)
            if key.endswith("sinks"):
                weight.copy_(2 + noise)  # a sink competes with the sum over dozens of keys
            elif any(norm in key for norm in QUERY_KEY_NORMS):
                weight.add_(1 + 0.1 * noise)  # the factor does not reach such scores: make them sharper
            elif weight.dim() == 1 or key.endswith("bias"):
                weight.add_(0.1 * noise)
            else:
                weight.copy_(noise * BASE_STD * (1 if id(weight) in embeddings else factor))
    # The pad token only spares callers of generate() a warning.
    model.generation_config = GenerationConfig(eos_token_id=None, bos_token_id=None, pad_token_id=0)
    return model.requires_grad_(False)


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Run the body with another attention implementation, and restore the model afterwards."""
    found = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(found)


@torch.no_grad()
def plain_greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """The `num_tokens` new tokens that the plain model generates greedily after `prompt` alone."""
    input_ids = torch.tensor([prompt], device=model.device)
    with attention_implementation(model, "eager"):
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),  # else generate() masks prompt tokens that equal the pad token
            max_new_tokens=num_tokens,
            do_sample=False,
        )
    return output[0, len(prompt) :].tolist()


@torch.no_grad()
def plain_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """The plain model's logits [len(token_ids), V] in one forward of one sequence, without a cache."""
    with attention_implementation(model, "eager"):
        return model(torch.tensor([token_ids], device=model.device), use_cache=False).logits[0]


class Mutation(Enum):
    """One way to break attention."""

    NONE = "nothing: the correct packed forward"
    NO_CAUSALITY = "tokens see later ones of their sequence"
    NO_ISOLATION = "sequences see each other (causal by row order)"
    NO_WINDOW = "sliding layers see everything before"
    NO_SOFTCAP = "attention scores are not capped"
    NO_SINKS = "no sinks in the softmax"
    LOST_BLOCK = "tokens from position FAR on do not see the 16 tokens before FAR"
    SHIFTED_POSITIONS = "positions are one too large from FAR on"


@dataclass(frozen=True, slots=True)
class Packing:
    """What the mutant attention must know about its row: `sequence_ids` and `positions` are [T] int64."""

    sequence_ids: Tensor
    positions: Tensor
    mutation: Mutation

    def mask(self, window: int | None) -> Tensor:
        """[T, T] bool: may the query of a row see the key of a column?"""
        rows = torch.arange(len(self.positions))
        visible = torch.ones(len(rows), len(rows), dtype=torch.bool)
        if self.mutation is not Mutation.NO_CAUSALITY:
            visible &= rows[:, None] >= rows
        if self.mutation is not Mutation.NO_ISOLATION:
            visible &= self.sequence_ids[:, None] == self.sequence_ids
        if window is not None and self.mutation is not Mutation.NO_WINDOW:
            visible &= self.positions[:, None] - self.positions < window
        if self.mutation is Mutation.LOST_BLOCK:
            in_block = (self.positions >= FAR - 16) & (self.positions < FAR)
            visible &= ~((self.positions >= FAR)[:, None] & in_block)
        return visible


_PACKING: ContextVar[Packing] = ContextVar("zoo_packing")
MUTANT = "zoo_mutant"


def _mutant_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Eager attention over the packed row, [1, heads, T, head size] each, with the mask of the current `Packing`."""
    assert attention_mask is None, "no mask function is registered for this name, so the model should not send a mask"
    packing = _PACKING.get()
    num_groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(num_groups, dim=1), value.repeat_interleave(num_groups, dim=1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None and packing.mutation is not Mutation.NO_SOFTCAP:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~packing.mask(sliding_window), float("-inf"))
    if s_aux is not None and packing.mutation is not Mutation.NO_SINKS:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(-1, -1, query.shape[2], -1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(MUTANT, _mutant_attention)


@torch.no_grad()
def packed_logits(
    model: PreTrainedModel, sequences: list[list[int]], mutation: Mutation = Mutation.NONE
) -> list[Tensor]:
    """Each sequence's logits [len, V] from one forward of all of them in one row, attention mutated as asked."""
    lengths = [len(sequence) for sequence in sequences]
    positions = torch.cat([torch.arange(length) for length in lengths])
    sequence_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    token_ids = torch.tensor([[token for sequence in sequences for token in sequence]])
    shift = (positions >= FAR) if mutation is Mutation.SHIFTED_POSITIONS else torch.zeros_like(positions)
    token = _PACKING.set(Packing(sequence_ids, positions, mutation))
    try:
        with attention_implementation(model, MUTANT):
            logits = model(token_ids, position_ids=(positions + shift)[None], use_cache=False).logits[0]
    finally:
        _PACKING.reset(token)
    return list(logits.split(lengths))


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """How sensitive a model is: shares of changed argmaxes, and the distinct tokens among NUM_GREEDY_TOKENS."""

    share_changed_without_causality: float
    share_changed_without_isolation: float
    num_distinct_greedy_tokens: int

    def suffices(self, min_share: float = 0.5, min_distinct: int = 20) -> bool:
        shares = (self.share_changed_without_causality, self.share_changed_without_isolation)
        return min(shares) >= min_share and self.num_distinct_greedy_tokens >= min_distinct


def mechanisms(model: PreTrainedModel) -> list[Mutation]:
    """Other attention mechanisms that tests rely on, as the mutations that remove them."""
    found = [Mutation.LOST_BLOCK, Mutation.SHIFTED_POSITIONS]
    if getattr(model.config, "sliding_window", None) is not None:
        found.append(Mutation.NO_WINDOW)
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        found.append(Mutation.NO_SOFTCAP)
    if any(hasattr(module, "sinks") for module in model.modules()):
        found.append(Mutation.NO_SINKS)
    return found


def sample_sequences(seed: int = 0) -> list[list[int]]:
    """Random token sequences of SEQUENCE_LENGTHS, the same for every model."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist() for length in SEQUENCE_LENGTHS]


def share_changed(model: PreTrainedModel, mutation: Mutation) -> float:
    """The share of argmaxes that a mutation changes, among the positions that it can reach.

    Without isolation that is all but the first sequence, which has nothing before it in its row.
    """
    first = 1 if mutation is Mutation.NO_ISOLATION else 0
    start = FAR if mutation in (Mutation.LOST_BLOCK, Mutation.SHIFTED_POSITIONS) else 0
    correct, mutated = (
        torch.cat([logits.argmax(-1)[start:] for logits in packed_logits(model, sample_sequences(), each)[first:]])
        for each in (Mutation.NONE, mutation)
    )
    return (correct != mutated).float().mean().item()


def sensitivity(model: PreTrainedModel) -> Sensitivity:
    """Measure a model; `Sensitivity.suffices` says whether a test may rely on it."""
    return Sensitivity(
        share_changed_without_causality=share_changed(model, Mutation.NO_CAUSALITY),
        share_changed_without_isolation=share_changed(model, Mutation.NO_ISOLATION),
        num_distinct_greedy_tokens=len(set(plain_greedy(model, sample_sequences()[0], NUM_GREEDY_TOKENS))),
    )


def packing_noise(model: PreTrainedModel) -> float:
    """The largest difference of logits between packed and plain forwards, relative to the plain logits' range."""
    sequences = sample_sequences()
    plain = torch.cat([plain_logits(model, sequence) for sequence in sequences])
    packed = torch.cat(packed_logits(model, sequences))
    return ((packed - plain).abs().max() / (plain.max() - plain.min())).item()


def is_sensitive(model: PreTrainedModel) -> bool:
    """Whether a model meets all requirements of a test with some margin."""
    return (
        packing_noise(model) < 1e-5
        and sensitivity(model).suffices(min_share=0.6, min_distinct=24)
        and all(share_changed(model, mutation) >= 0.25 for mutation in mechanisms(model))
    )


def find_factor(name: str) -> float:
    """The smallest factor of the ladder that makes an architecture sensitive for several seeds: how FACTORS was made.

    The smallest, because large matrices make a model chaotic: they amplify rounding noise along with everything else.
    """
    for factor in FACTOR_LADDER:
        if all(is_sensitive(draw(name, factor, seed)) for seed in range(3)):
            return factor
    raise ValueError(f"no factor of {FACTOR_LADDER} makes {name} sensitive; it needs a recipe of its own")
