"""Preparation accepts every model that packed rows reproduce, with any weights, and finds its limits."""

import pytest
import torch

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.errors import ModelError
from inflight.execution.model_runner import ModelRunner
from tests import zoo
from tests.execution.prepared_models import default_model, every_architecture, report_of, tiny_gqa


@every_architecture
def test_a_model_is_accepted_with_its_attention_as_configured(name: str) -> None:
    model = zoo.build(name)
    config = model.config
    head_sizes = (24, 16) if name == "deepseek_v3" else (16, 16)
    report = report_of(model)
    assert max(report.logits_error, report.attention_error) < 1e-5
    assert report.max_model_len == config.max_position_embeddings
    assert report.notes == ()
    assert len(report.specs) == config.num_hidden_layers
    scale = 1.0 if name == "opt" else getattr(config, "query_pre_attn_scalar", head_sizes[0]) ** -0.5
    slides = getattr(config, "sliding_window", None) is not None
    layer_types = getattr(config, "layer_types", None) or [zoo.SLIDING if slides else zoo.FULL] * len(report.specs)
    assert [spec.window for spec in report.specs] == [
        zoo.WINDOW if layer_type == zoo.SLIDING else None for layer_type in layer_types
    ]
    for spec in report.specs:
        assert spec.num_heads == 4
        assert spec.num_kv_heads == getattr(config, "num_key_value_heads", 4)
        assert (spec.head_size, spec.value_head_size) == head_sizes
        assert spec.scale == pytest.approx(scale)
        assert spec.softcap == getattr(config, "attn_logit_softcapping", None)
        assert spec.has_sinks == (name == "gpt_oss")
        assert spec.chunk is None


@every_architecture
def test_a_model_in_bfloat16_is_accepted(name: str) -> None:
    """Sensitive models amplify rounding, and a mixture of experts may route a token differently; neither is an
    error."""
    report_of(zoo.draw(name, zoo.FACTORS[name], seed=0).to(torch.bfloat16))


@every_architecture
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_default_initialised_model_is_accepted(name: str, dtype: torch.dtype) -> None:
    report = report_of(default_model(zoo.ARCHITECTURES[name]()).to(dtype))
    assert max(report.logits_error, report.attention_error) < (1e-5 if dtype == torch.float32 else 0.05)


def test_the_runner_reports_how_it_runs_a_model() -> None:
    info = ModelRunner(zoo.build("gpt_oss"), EngineConfig(num_blocks=8)).info
    heads = "4 heads over 2 key/value heads of size 16"
    assert info.executor == "packed"
    assert info.attention_backend == "cpu"
    assert info.attention_calls == (f"2 x {heads}, window 12, sinks", f"1 x {heads}, sinks")
    assert max(info.logits_error, info.attention_error) < 1e-5


def test_the_attention_chunks_of_llama_4_are_found() -> None:
    chunked = {"attention_chunk_size": 8, "layer_types": ["chunked_attention", zoo.FULL, "chunked_attention"]}
    config = tiny_gqa("llama4_text", num_local_experts=2, **chunked)
    assert [spec.chunk for spec in report_of(default_model(config)).specs] == [8, None, 8]


def test_llama_4_is_limited_to_the_length_before_it_scales_by_position_in_the_row() -> None:
    model = default_model(tiny_gqa("llama4_text", floor_scale=40, num_local_experts=2, attention_chunk_size=8))
    report = report_of(model)
    assert (report.max_model_len, report.max_row_len) == (39, 39)
    with pytest.raises(ModelError, match="max_num_batched_tokens is 64; this model accepts at most 39"):
        ModelRunner(model, EngineConfig(max_num_batched_tokens=64))


def test_a_window_that_attention_does_not_receive_is_left_to_the_model() -> None:
    """Phi-3.5-MoE implements its window with its own mask."""
    model = default_model(tiny_gqa("phimoe", num_local_experts=4, sliding_window=40))
    info = ModelRunner(model, EngineConfig(num_blocks=8)).info
    assert (info.executor, info.max_model_len) == ("rows", model.config.max_position_embeddings)
    assert "its sliding window of 40" in info.notes[0]
