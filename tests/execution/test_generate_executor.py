"""Models that run in no other way run in their own `generate`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedModel

from inflight import LLM, ModelError, SamplingParams
from tests.execution.prepared_models import default_model, tiny_gqa

PROMPTS = ([5, 6, 7, 8], [9, 10, 11], [3, 4] * 20, [12])
OPTIONS = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "num_blocks": 64, "block_size": 4}
NUM_TOKENS = 10


def encoder_decoder(model_type: str) -> PreTrainedModel:
    sizes = {"d_model": 32, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "d_ff": 64, "vocab_size": 64}
    positions = {"max_position_embeddings": 128, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    heads = {"num_heads": 4, "d_kv": 8, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    begins = {"decoder_start_token_id": 2, "forced_eos_token_id": None, "eos_token_id": None}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = AutoConfig.for_model(model_type, **sizes, **positions, **heads, **begins)
        model: PreTrainedModel = AutoModelForSeq2SeqLM.from_config(config).eval()
        for parameter in model.parameters():
            parameter.data += 0.3 * torch.randn(parameter.shape)
    return model


@torch.no_grad()
def plain(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    given = torch.tensor([prompt])
    output = model.generate(input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=NUM_TOKENS)
    return list(output[0, -NUM_TOKENS:].tolist())


@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_an_encoder_decoder_gives_the_tokens_of_its_generate(model_type: str, tmp_path: Path) -> None:
    model = encoder_decoder(model_type)
    expected = [plain(model, prompt) for prompt in PROMPTS]
    assert len(set(map(tuple, expected))) >= 3
    model.save_pretrained(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
    for source in (model, str(tmp_path)):
        llm = LLM(source, **OPTIONS)
        assert llm.model_info.executor == "generate"
        assert f"{type(model).__name__} is an encoder-decoder" in llm.model_info.notes[0]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
        assert [list(each.outputs[0].token_ids) for each in outputs] == expected
        alone = llm.generate({"prompt_token_ids": PROMPTS[1]}, params, use_tqdm=False)[0]
        assert alone.outputs[0].logprobs == outputs[1].outputs[0].logprobs


def test_what_it_cannot_do_is_refused() -> None:
    model = encoder_decoder("t5")
    with pytest.raises(ModelError, match="is an encoder-decoder; such a model runs in its own generate"):
        LLM(model, executor="packed", **OPTIONS)
    with pytest.raises(ModelError, match="quantization is not supported with a model that does not run packed"):
        LLM(model, quantization="int8", **OPTIONS)
    llm = LLM(model, **OPTIONS)
    with pytest.raises(ValueError, match="generate runs this prompt, without prompt_logprobs"):
        llm.generate({"prompt_token_ids": [3, 4]}, SamplingParams(max_tokens=2, prompt_logprobs=1), use_tqdm=False)


def test_it_can_be_asked_for() -> None:
    """Of a model that ends by itself, too: the engine ends a sequence at the same token."""
    model = default_model(tiny_gqa("llama"))
    given = torch.tensor([PROMPTS[0]])
    expected = model.generate(input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=NUM_TOKENS)
    llm = LLM(model, executor="generate", **OPTIONS)
    outputs = llm.generate({"prompt_token_ids": PROMPTS[0]}, SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
    assert list(outputs[0].outputs[0].token_ids) == expected[0, len(PROMPTS[0]) :].tolist()


def test_a_failing_prompt_ends_alone_and_others_do_not_start_over(monkeypatch: pytest.MonkeyPatch) -> None:
    model = encoder_decoder("t5")
    expected = [plain(model, prompt) for prompt in PROMPTS]
    llm = LLM(model, **OPTIONS)
    own: Any = llm.engine.runner.model
    generate, begun = own.generate, list[int]()

    def sometimes(input_ids: torch.Tensor, **options: Any) -> Any:
        begun.append(input_ids.shape[1])
        if input_ids.shape[1] == len(PROMPTS[1]):
            raise RuntimeError("no\nmemory")
        return generate(input_ids=input_ids, **options)

    monkeypatch.setattr(own, "generate", sometimes)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    assert outputs[1].error == "the model's generate fails: no"
    assert [list(outputs[each].outputs[0].token_ids) for each in (0, 2, 3)] == [expected[each] for each in (0, 2, 3)]
    assert sorted(begun) == sorted(map(len, PROMPTS))
