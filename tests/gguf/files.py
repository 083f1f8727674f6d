"""GGUF files of tiny models, written with the `gguf` package, as llama.cpp's converter would write them."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

SCALES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "TQ1_0": [52],
    "TQ2_0": [64],
    "IQ1_S": [0],
    "IQ2_XXS": [0],
    "IQ2_XS": [0],
    "IQ2_S": [0],
    "IQ3_XXS": [0],
    "IQ3_S": [0],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
}
"""Where the float16 of a block are."""
EXPONENT = {"MXFP4": 0}
"""Where a block has the exponent of its scale."""
COMMON = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "vocab_size": "vocab_size",
}
"""Metadata, and what they are called in a configuration."""
ROLES = {"bos": "bos", "eos": "eos", "padding": "pad"}
"""Tokens with a role, and what a tokenizer calls the role."""
Metadata = str | int | float | list[int]
ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "qwen3_moe": "qwen3moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
"""What llama.cpp calls a type of models, if not the same."""
GPT2 = {"context_length": "n_positions", "attention.layer_norm_epsilon": "layer_norm_epsilon"}


def random_blocks(kind: str, num_rows: int, num_inputs: int, size: float = 0.01, seed: int = 0) -> torch.Tensor:
    """Blocks `[rows, in / block, bytes]` uint8 of which every bit is random, except for the size of their scales."""
    elements, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, num_inputs // elements)
    blocks = torch.randint(0, 256, (*shape, num_bytes), generator=generator, dtype=torch.uint8)
    if kind in EXPONENT:
        blocks[..., EXPONENT[kind]] = torch.randint(115, 125, shape, generator=generator, dtype=torch.uint8)
    if kind == "IQ1_M":  # a scale's bits are the highest of four words
        scales = torch.randn(shape, generator=generator).mul(size).half().view(torch.int16).int()
        words = blocks[..., -8:].view(torch.int16).int() & 0x0FFF
        words |= (scales[..., None] >> torch.arange(0, 16, 4) & 15) << 12
        blocks[..., -8:] = words.to(torch.int16).view(torch.uint8)
    for place in SCALES.get(kind, []):
        scales = torch.randn(shape, generator=generator).mul(size).half()
        blocks[..., place : place + 2] = scales[..., None].view(torch.uint8)
    return blocks


def tiny(model_type: str, **changes: Any) -> PreTrainedModel:
    """A tiny random model whose matrices have 256 inputs, as K-quants need them."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    common = sizes | {"vocab_size": 320, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 512}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(model_type, **(common | ids | {"tie_word_embeddings": False} | changes))
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, each in model.named_parameters():
            if each.dim() > 1 and "embed" not in name:
                each.mul_(4)
            elif each.dim() == 1:
                each.add_(torch.randn(each.shape) * 0.1)
    return model


def continuation(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """What `transformers` makes of a prompt, greedily."""
    ids = torch.tensor([prompt])
    given = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
    tokens: list[int] = given[0, len(prompt) :].tolist()
    return tokens


def write(
    path: Path,
    model: PreTrainedModel,
    kind_of: Callable[[str], str],
    tokenizer: PreTrainedTokenizerBase | None = None,
    extra: Mapping[str, Metadata] | None = None,
    more: Mapping[str, torch.Tensor] | None = None,
    tensors_of_part: int = 0,
    ids: Mapping[str, int] | None = None,
) -> None:
    """Write `model` to a file; `kind_of` says by its name in the file in which type a matrix is. `extra` is metadata
    about the architecture, `more` are further tensors, and `ids` tokens with a role, as the file calls it. With
    `tensors_of_part` it becomes several files, of this number of tensors each."""
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_of_part)
    _write_metadata(writer, config)
    kinds: dict[type, Callable[..., None]] = {
        str: writer.add_string,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for key, value in {**_states_metadata(architecture, config), **(extra or {})}.items():
        kinds[type(value)](f"{architecture}.{key}", value)
    if tokenizer is not None:
        _write_tokenizer(writer, tokenizer, ids or {})
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tied = config.tie_word_embeddings
    for name, values in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        for own, tensor in _as_converted(architecture, config, name, values):
            stem, _, ending = name.rpartition(".")
            _write_tensor(writer, own or f"{names.get_name(stem)}.{ending}", tensor, kind_of)
    for name, tensor in (more or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_metadata(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    keys = COMMON | (GPT2 if config.model_type == "gpt2" else {})
    for key, attribute in keys.items():
        value = getattr(config, attribute, None)
        if writer.arch == "lfm2" and key in ("attention.head_count_kv", "attention.key_length"):
            continue
        if isinstance(value, float):
            writer.add_float32(f"{writer.arch}.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{writer.arch}.{key}", value)
    theta = getattr(config, "rope_parameters", None) or {}
    theta = theta.get("full_attention", theta).get("rope_theta")
    if theta is not None:
        writer.add_float32(f"{writer.arch}.rope.freq_base", theta)
    if config.model_type == "llama":
        writer.add_uint32("llama.rope.dimension_count", config.head_dim)


def write_vocabulary(
    path: Path, tokenizer: PreTrainedTokenizerBase, pre: str | None = None, ids: Mapping[str, int] | None = None
) -> None:
    """Write a file that has only a tokenizer, with the name `pre` of its pre-tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    _write_tokenizer(writer, tokenizer, ids or {})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def _write_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, ids: Mapping[str, int]) -> None:
    """Byte-level BPE."""
    written = json.loads(tokenizer.backend_tokenizer.to_str())
    control = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in control else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in written["model"]["merges"]])
    own = {name: getattr(tokenizer, f"{short}_token_id") for name, short in ROLES.items()}
    for name, token_id in {**own, **ids}.items():
        if token_id is not None:
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)
    writer.add_add_bos_token(tokenizer.bos_token_id is not None)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def _as_converted(
    architecture: str, config: PreTrainedConfig, name: str, values: torch.Tensor
) -> list[tuple[str | None, torch.Tensor]]:
    """The tensors that llama.cpp's converter makes of one, each with its name if that is not the usual one."""
    layer = re.search(r"layers\.(\d+)\.", name)
    if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        pairs = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
        return [(None, pairs.transpose(1, 2).reshape(values.shape))]
    if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        return [(None, values + 1)]
    if architecture == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return [(None, values.T)]
    if layer and name.endswith("experts.gate_up_proj"):
        gate, up = values.chunk(2, dim=1)
        return [(f"blk.{layer[1]}.ffn_gate_exps.weight", gate), (f"blk.{layer[1]}.ffn_up_exps.weight", up)]
    if layer and name.endswith("experts.down_proj"):
        return [(f"blk.{layer[1]}.ffn_down_exps.weight", values)]
    if architecture in ("qwen35", "qwen35moe"):
        own = f"blk.{layer[1]}" if layer else ""
        return [_as_converted_from_qwen35(config, name, values, own)]
    if layer and name.endswith("conv.conv.weight"):
        return [(f"blk.{layer[1]}.shortconv.conv.weight", values.squeeze(1))]
    return [(None, values)]


def _as_converted_from_qwen35(
    config: PreTrainedConfig, name: str, values: torch.Tensor, layer: str
) -> tuple[str | None, torch.Tensor]:
    """Norms are stored with one more, decays as they are, and heads of values that share a key apart."""
    num_keys, size = config.linear_num_key_heads, config.linear_value_head_dim
    each = config.linear_num_value_heads // num_keys

    def apart(part: torch.Tensor, size: int) -> torch.Tensor:
        return part.reshape(num_keys, each, size, *part.shape[1:]).transpose(0, 1).reshape(part.shape)

    if name.endswith("norm.weight") and "linear_attn" not in name:
        return None, values + 1
    if name.endswith("A_log"):
        return f"{layer}.ssm_a", apart(-values.exp(), 1)
    if name.endswith("dt_bias"):
        return f"{layer}.ssm_dt.bias", apart(values, 1)
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight")):
        return None, apart(values, 1)
    if name.endswith("in_proj_z.weight"):
        return None, apart(values, size)
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        values = values.squeeze(1) if values.dim() == 3 else values
        first = 2 * num_keys * config.linear_key_head_dim
        return None, torch.cat([values[:first], apart(values[first:], size)])
    if name.endswith("linear_attn.out_proj.weight"):
        return None, apart(values.T, size).T.contiguous()
    if name.endswith("shared_expert_gate.weight"):
        return f"{layer}.ffn_gate_inp_shexp.weight", values[0]
    return None, values


def _states_metadata(architecture: str, config: PreTrainedConfig) -> dict[str, Metadata]:
    """Metadata of models with recurrent states."""
    if architecture == "lfm2":
        is_attention = [each == "full_attention" for each in config.layer_types]
        return {
            "attention.head_count_kv": [config.num_key_value_heads * each for each in is_attention],
            "shortconv.l_cache": config.conv_L_cache,
            "attention.layer_norm_rms_epsilon": config.norm_eps,
        }
    if architecture not in ("qwen35", "qwen35moe"):
        return {}
    parameters = config.rope_parameters
    found: dict[str, Metadata] = {
        "full_attention_interval": config.layer_types.index("full_attention") + 1,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "rope.dimension_sections": [*parameters["mrope_section"], 0],
        "rope.dimension_count": int(config.head_dim * parameters["partial_rotary_factor"]),
    }
    if architecture == "qwen35moe":
        found["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    return found


def _write_tensor(writer: gguf.GGUFWriter, name: str, values: torch.Tensor, kind_of: Callable[[str], str]) -> None:
    kind = kind_of(name) if values.dim() > 1 and "conv" not in name.split(".")[-2] else "F32"
    if kind == "F32":
        writer.add_tensor(name, values.float().contiguous().numpy())
        return
    if kind == "IQ1_M" or (kind in SCALES and kind.endswith(("_K", "_XXS", "_XS", "_NL", "_S"))):  # as it cannot round
        size = 0.1 * float(values.std()) / (1 if kind == "IQ4_NL" else 20)
        packed = random_blocks(kind, values[..., 0].numel(), values.shape[-1], size, seed=len(name))
        data = packed.reshape(*values.shape[:-1], -1).numpy()
    else:
        data = gguf.quantize(values.float().contiguous().numpy(), gguf.GGMLQuantizationType[kind])
    writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=gguf.GGMLQuantizationType[kind])
