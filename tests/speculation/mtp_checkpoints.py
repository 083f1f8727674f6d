"""Tiny checkpoints with a layer for multi-token prediction, named and laid out as the published ones."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import MtpModel

MLA = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": 24, "kv_lora_rank": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, **EXPERTS}
FULL, WINDOW = "full_attention", "sliding_attention"
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_key_value_heads": 4, "first_k_dense_replace": 1, **MLA, **ROUTED},
    "glm4_moe": {"head_dim": 16, "first_k_dense_replace": 1, **ROUTED},
    "glm4_moe_lite": {"num_key_value_heads": 4, "mlp_layer_types": ["dense", "sparse"], **MLA, **ROUTED},
    "mellum": {
        "head_dim": 16,
        "num_experts": 4,
        "layer_types": [WINDOW, FULL],
        "mlp_layer_types": ["sparse", "sparse"],
        "sliding_window": 12,
        **EXPERTS,
    },
}
"""By model type. The class of the third drops the layer, and its configuration does not know of it."""
OF_MELLUM = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}


def draw_checkpoint(folder: Path, model_type: str, *, foretells: bool = False) -> PreTrainedModel:
    """Write a checkpoint with random weights to a folder; return its model.

    Args:
        foretells: whether the layer is always right. Then neither its block nor the model's do anything: the next
            token depends on the last one alone, and the layer reads nothing else.
    """
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "num_nextn_predict_layers": 1}
    config = AutoConfig.for_model(model_type, **{**sizes, **heads, **tokens, **CONFIGS[model_type]})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    _draw(model, foretells=foretells)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file(load_file(path) | _layer(model, model_type, foretells=foretells), path, metadata={"format": "pt"})
    return model


def _layer(model: PreTrainedModel, model_type: str, *, foretells: bool) -> dict[str, torch.Tensor]:
    """The tensors of the layer for multi-token prediction, under the names that checkpoints give them."""
    config = model.config
    for kinds, of_mtp in (("layer_types", "mtp_layer_types"), ("mlp_layer_types", "mtp_mlp_layer_types")):
        if getattr(config, kinds, None) and not getattr(config, of_mtp, None):
            setattr(config, of_mtp, getattr(config, kinds)[-1:])
    config.num_mtp_layers = 1
    layer = MtpModel(model, 1).float().layers[0].requires_grad_(False)
    _draw(layer, foretells=foretells)
    if foretells:
        layer.eh_proj.weight.copy_(torch.eye(64, 128))
        layer.enorm.weight.fill_(1.0)
        layer.post_norm.weight.copy_(model.get_decoder().norm.weight)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in layer.state_dict().items():
        name = name.removeprefix("mtp_block.")
        if name == "mlp.experts.gate_up_proj":
            for number, expert in enumerate(tensor):
                tensors[f"mlp.experts.{number}.gate_proj.weight"], tensors[f"mlp.experts.{number}.up_proj.weight"] = (
                    each.contiguous() for each in expert.chunk(2)
                )
        elif name == "mlp.experts.down_proj":
            tensors |= {f"mlp.experts.{number}.down_proj.weight": each.clone() for number, each in enumerate(tensor)}
        else:
            tensors[name] = tensor.contiguous()
    return {_published(name, model_type, config.num_hidden_layers): each for name, each in tensors.items()}


def _published(name: str, model_type: str, number: int) -> str:
    part, _, rest = name.partition(".")
    if model_type == "mellum":
        return f"mtp.{OF_MELLUM[part]}.{rest}" if part in OF_MELLUM else f"mtp.layers.0.{name}"
    return f"model.layers.{number}.{'shared_head.norm' if part == 'post_norm' else part}.{rest}"


def _draw(module: torch.nn.Module, *, foretells: bool) -> None:
    """Draw weights that make a module sensitive to its context."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in sorted([*module.named_parameters(), *module.named_buffers()]):
        noise = torch.randn(weight.shape, generator=generator)
        if "norm" in name:
            weight.copy_(1 + 0.1 * noise)
        elif name.endswith("e_score_correction_bias"):
            weight.copy_(0.1 * noise)
        elif weight.dim() >= 2:
            is_last = "o_proj" in name or "down_proj" in name
            weight.copy_(noise * (0.0 if foretells and is_last else 0.02 if "embed" in name else 0.16))
