"""Tiny models with more than usual attention (their own, recurrent states), drawn like those of the zoo."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from tests import zoo
from tests.zoo import BASE_STD, FULL, SLIDING, VOCAB_SIZE, _config, _gqa_config

LINEAR = "linear_attention"


def _qwen3_next() -> PreTrainedConfig:
    heads = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    layers = {"num_hidden_layers": 4, "layer_types": [LINEAR, LINEAR, FULL, LINEAR]}
    return _gqa_config("qwen3_next", head_dim=16, shared_expert_intermediate_size=32, **heads, **experts, **layers)


def _falcon_h1() -> PreTrainedConfig:
    states = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
    return _gqa_config("falcon_h1", head_dim=16, mamba_expand=1, mamba_chunk_size=8, **states)


ROWS: dict[str, Callable[[], PreTrainedConfig]] = {
    "bloom": lambda: _config("bloom", n_layer=3, n_head=4, hidden_dropout=0.0, attention_dropout=0.0),
    "falcon": lambda: _config("falcon", alibi=True, multi_query=True, hidden_dropout=0.0, attention_dropout=0.0),
    "gpt_neo": lambda: _config(
        "gpt_neo", num_hidden_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]], window_size=12
    ),
    "mpt": lambda: _config("mpt", d_model=64, n_layers=3, n_heads=4, max_seq_len=256),
    "xglm": lambda: _config("xglm", d_model=64, num_layers=3, attention_heads=4, ffn_dim=96, dropout=0.0),
}
"""Custom attention with ordinary keys and values."""

STATES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_next": _qwen3_next,
    "falcon_h1": _falcon_h1,
    "mamba": lambda: _config("mamba", state_size=8),
    "mamba2": lambda: _config("mamba2", num_heads=8, head_dim=16, state_size=8, n_groups=1, chunk_size=8),
    "lfm2": lambda: _gqa_config("lfm2", num_hidden_layers=4, layer_types=["conv", "conv", FULL, "conv"]),
    "lfm3": lambda: _gqa_config("lfm3", num_hidden_layers=4, layer_types=["conv", "conv", FULL, "conv"]),
}
"""Recurrent states, with or without attention."""

CLAMPED = _config(
    "mamba2", num_heads=8, head_dim=16, state_size=8, n_groups=1, chunk_size=8, time_step_limit=(0.5, 100.0)
)
"""Time steps are clamped in a prompt and not token by token, so the two paths of `transformers` differ."""

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SEQUENTIAL: dict[str, Callable[[], PreTrainedConfig]] = {
    "rwkv": lambda: _config("rwkv", attention_hidden_size=64, context_length=256),
    "openai-gpt": lambda: _config("openai-gpt", n_embd=64, n_layer=3, n_head=4, n_positions=256, **NO_DROPOUT),
}
"""A cache unlike that of any other model, or none."""

POSITIONS: dict[str, Callable[[], PreTrainedConfig]] = {
    "blenderbot": lambda: _config(
        "blenderbot", d_model=64, encoder_layers=2, decoder_layers=3, decoder_attention_heads=4, decoder_ffn_dim=96
    ),
    "roberta": lambda: _config("roberta", intermediate_size=96, is_decoder=True, type_vocab_size=1, pad_token_id=1),
}
"""Positions that its own embeddings count, from zero or from the padding token."""

ALL = ROWS | STATES | SEQUENTIAL | POSITIONS
"""`ROWS` and `SEQUENTIAL` cannot run as packed rows."""


def _shares_keys(model_type: str, **changes: Any) -> PreTrainedConfig:
    """The last two layers read the keys and values of the two layers before them."""
    layers = {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 2}
    per_layer = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB_SIZE}
    return _gqa_config(model_type, head_dim=16, sliding_window=12, **layers, **per_layer, **changes)


def _two_shapes(**changes: Any) -> PreTrainedConfig:
    """The layers with full attention have heads that are twice as wide."""
    layers = {"num_hidden_layers": 6, "layer_types": [SLIDING, SLIDING, FULL] * 2, "sliding_window": 12}
    per_layer = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB_SIZE}
    return _gqa_config(
        "gemma4_text", head_dim=16, global_head_dim=32, num_kv_shared_layers=0, **layers, **per_layer, **changes
    )


def _llama4() -> PreTrainedConfig:
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 96}
    chunked = {"attention_chunk_size": 16, "attn_temperature_tuning": False, "interleave_moe_layer_step": 2}
    layers = {"num_hidden_layers": 4, "layer_types": ["chunked_attention"] * 3 + [FULL], "no_rope_layers": [1, 1, 1, 0]}
    return _gqa_config("llama4_text", head_dim=16, **experts, **chunked, **layers)


OTHERS = {
    "llama4": _llama4,
    "deep": lambda: _config("mamba", num_hidden_layers=24, state_size=8, hidden_size=128),
    "clamped": lambda: CLAMPED,
    "gemma3n": lambda: _shares_keys("gemma3n_text", laurel_rank=8, activation_sparsity_pattern=[0.0] * 4),
    "gemma4": lambda: _shares_keys("gemma4_text", global_head_dim=32, use_double_wide_mlp=False),
    "gemma4_large": lambda: _two_shapes(num_global_key_value_heads=2),
    "gemma4_few_global": lambda: _two_shapes(
        num_key_value_heads=4, num_global_key_value_heads=1, attention_k_eq_v=True
    ),
}
FACTORS = {
    "deep": 12.0,
    "gpt_neo": 12.0,
    "bloom": 16.0,
    "falcon": 16.0,
    "mpt": 16.0,
    "xglm": 24.0,
    "rwkv": 24.0,
    "blenderbot": 16.0,
    "openai-gpt": 40.0,
}


@cache
def build(name: str, seed: int = 0) -> PreTrainedModel:
    """Build a float32 model in evaluation mode, of the zoo or one of these. Their matrices are drawn with a larger
    deviation than usual, so that context matters. The proof itself measures how much, and refuses a model that does not
    depend on context."""
    if name in zoo.ARCHITECTURES:
        return zoo.build(name, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config((ALL | OTHERS)[name](), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    with torch.no_grad():
        for key, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 2 and id(weight) not in embeddings and not _is_special(key):
                weight.copy_(noise * BASE_STD * FACTORS.get(name, 6.0))
            elif key.endswith("bias"):
                weight.add_(0.1 * noise)
    model.generation_config = GenerationConfig(eos_token_id=None, bos_token_id=None, pad_token_id=0)
    return model.requires_grad_(False)


def _is_special(key: str) -> bool:
    """Parameters of recurrences keep the values that their class gave them."""
    return any(part in key for part in ("A_log", "dt_", "conv1d", "time_"))


@torch.no_grad()
def plain_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Logits `[L, V]` of one forward pass without a cache."""
    logits: torch.Tensor = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits
    return logits[0]


def wrong_tokens(model: PreTrainedModel, prompt: list[int], output: list[int]) -> list[int]:
    """The positions where the plain model, given the same previous tokens, would choose another token. If its two best
    tokens differ by less than rounding, either is right."""
    logits = plain_logits(model, [*prompt, *output])[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    behind = (logits.max(dim=-1).values - chosen) / (logits.max() - logits.min())
    return torch.nonzero(behind > 4e-5).flatten().tolist()


def num_tokens() -> int:
    """The size of the vocabulary."""
    return VOCAB_SIZE


def options(**changes: Any) -> dict[str, Any]:
    """Options of an engine that has to chunk, mix and preempt."""
    return {"max_num_batched_tokens": 24, "num_blocks": 40, "block_size": 4, "max_num_seqs": 6, **changes}
