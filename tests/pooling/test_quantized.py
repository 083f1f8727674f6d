"""Models with weights of a few bits embed, too: of files, and rounded when they are loaded."""

from pathlib import Path

import pytest
import torch

from inflight import LLM
from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.errors import ModelError
from inflight.contracts.api.pooling import PooledText, PoolingPlan
from tests.gguf.files import tiny, write
from tests.gguf.test_gguf_models import of_kinds, read_by_transformers
from tests.pooling.checkpoints import TextRunner, draw_ids, make_model
from tests.pooling.test_exactness import STATES, embedding_of, texts_of

TEXTS = draw_ids(30, 3, 90)


@pytest.mark.parametrize(("pooling_type", "task", "mode"), [(3, "auto", -1), (1, "auto", None), (0, "embed", None)])
def test_a_gguf_file_embeds_as_it_says(pooling_type: int, task: str, mode: int | None, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, tiny("llama"), of_kinds("Q4_K", "Q6_K", "Q8_0"), extra={"pooling_type": pooling_type})
    llm = LLM(str(path), task=task, dtype="float32", quantization_arithmetic="exact")
    plain = read_by_transformers("llama", path)
    outputs = llm.embed(TEXTS)
    for ids, output in zip(TEXTS, outputs, strict=True):
        with torch.inference_mode():
            states = plain.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        expected = torch.nn.functional.normalize(states.mean(0) if mode is None else states[mode], dim=0)
        torch.testing.assert_close(torch.tensor(output.embedding), expected, rtol=1e-4, atol=1e-5)


def test_a_gguf_file_without_a_type_generates_and_cannot_classify(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, tiny("llama"), of_kinds("Q8_0"))
    assert LLM(str(path), num_blocks=60).model_info.pooling is None
    with pytest.raises(ModelError, match="a GGUF file has no head for that"):
        LLM(str(path), task="classify")


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_weights_that_are_rounded_at_load_embed_nearly_the_same(family: str) -> None:
    model, texts = make_model(family), texts_of(30, 3, 90)
    runner = TextRunner(model, EngineConfig(quantization="int8"), STATES)
    together = runner.run(texts)
    for text, own in zip(texts, together, strict=True):
        assert runner.run([text]) == [own]
        similarity = torch.cosine_similarity(torch.tensor(own), embedding_of(model, text.token_ids), dim=0)
        assert similarity > 0.98


def test_a_cache_of_int8_serves_texts_that_share_a_beginning() -> None:
    model, plan = make_model("qwen3"), PoolingPlan("embed", ("lasttoken",))
    runner = TextRunner(model, EngineConfig(kv_cache_dtype="int8", block_size=4), plan)
    texts = [PooledText([*TEXTS[0], number]) for number in range(3)]
    exact = TextRunner(model, EngineConfig(block_size=4), plan).run(texts)
    for own, expected in zip(runner.run(texts), exact, strict=True):
        assert torch.cosine_similarity(torch.tensor(own), torch.tensor(expected), dim=0) > 0.98
    assert runner.engine.stats().num_cached_tokens == 2 * 28
