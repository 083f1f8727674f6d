"""Preparation refuses every model that packed rows do not reproduce, with its name and the reason."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from transformers import PreTrainedConfig

from inflight.contracts.api.errors import ModelError
from inflight.execution.hf import mixer_hook
from inflight.execution.preparation import attention_calls
from tests import zoo
from tests.execution.packed_steps import assert_packed_is_plain, packed_executor, packed_logits
from tests.execution.prepared_models import default_model, plain_logits, report_of, tiny, tiny_gqa

REFUSED: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "bloom": (lambda: tiny("bloom"), "BloomForCausalLM does its attention itself"),
    "mpt": (lambda: tiny("mpt", d_model=64, n_heads=4, n_layers=2), "MptForCausalLM cannot run as a packed row"),
    "falcon, rotary": (lambda: tiny("falcon", alibi=False), "FalconForCausalLM cannot run as a packed row"),
    "falcon, alibi": (lambda: tiny("falcon", alibi=True), "FalconForCausalLM cannot run as a packed row"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_packed_is_refused_with_the_reason_and_left_unchanged(name: str) -> None:
    make_config, reason = REFUSED[name]
    model = default_model(make_config())
    found, expected = model.config._attn_implementation, plain_logits(model)
    with pytest.raises(ModelError, match=reason) as raised:
        report_of(model)
    assert "\n" not in str(raised.value)
    assert model.config._attn_implementation == found
    assert torch.equal(plain_logits(model), expected)


STATEFUL: dict[str, Callable[[], PreTrainedConfig]] = {
    "lfm2": lambda: tiny_gqa("lfm2", layer_types=["conv", zoo.FULL, "conv"]),
    "jamba": lambda: tiny_gqa(
        "jamba", attn_layer_period=3, attn_layer_offset=1, num_experts=1, use_mamba_kernels=False
    ),
    "falcon_h1": lambda: tiny_gqa(
        "falcon_h1", mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, mamba_chunk_size=16
    ),
    "recurrent_gemma": lambda: tiny_gqa("recurrent_gemma"),
    "qwen3_next": lambda: tiny_gqa(
        "qwen3_next",
        layer_types=["linear_attention", zoo.FULL, "linear_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    ),
}
"""Layers carry a state along the row, from one sequence into the next, unless we keep it by slot."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.thorough("dtype0")
def test_a_model_whose_states_are_not_ours_is_refused_with_any_weights(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (attention_calls, mixer_hook):
        monkeypatch.setattr(module, "mix_with", lambda _: nullcontext())
    with pytest.raises(ModelError):
        report_of(default_model(STATEFUL[name]()).to(dtype))


def test_a_mechanism_that_starts_beyond_the_proof_prompts_is_not_missed() -> None:
    """DeepSeek-V4 also attends to summaries of 128 tokens each; a short prompt has none."""
    config = tiny_gqa("deepseek_v4", sliding_window=zoo.WINDOW, n_routed_experts=4, num_experts_per_tok=2)
    model = default_model(config)
    prompts = [prompt * 3 for prompt in zoo.sample_sequences()]
    try:
        executor = packed_executor(model)
    except ModelError:
        return
    assert_packed_is_plain(model, packed_logits(executor, prompts), prompts)


def test_weights_that_are_not_numbers_are_refused() -> None:
    model = default_model(zoo.ARCHITECTURES["llama"]())
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = float("nan")
    with pytest.raises(ModelError, match="LlamaForCausalLM are not finite even when it runs alone"):
        report_of(model)
