"""The engine owns its weights: changing the files or the caller's model does not change its output."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from inflight import LLM, InvalidRequestError, SamplingParams
from inflight.execution.hf.load import WatchedWeights
from tests import zoo

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(zoo.sample_sequences(), GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def expected(model: PreTrainedModel) -> list[list[int]]:
    return [zoo.plain_greedy(model, prompt, 12) for prompt in zoo.sample_sequences()]


@pytest.mark.parametrize("name", ["gpt2", "gpt_oss", "qwen3_moe", "stablelm"])
def test_what_happens_to_the_files_changes_nothing(name: str, tmp_path: Path) -> None:
    model = zoo.build(name)
    model.save_pretrained(tmp_path)
    llm = LLM(tmp_path, dtype="float32")
    (file,) = tmp_path.glob("*.safetensors")
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    with file.open("r+b") as written:  # in place, as `cp` does
        written.seek(header)
        written.write(bytes(file.stat().st_size - header))
    assert tokens(llm) == expected(model)
    with file.open("r+b") as cut:
        cut.truncate(0)
    assert tokens(llm) == expected(model)


def trained(model: PreTrainedModel) -> None:
    """One step with a large rate."""
    model.requires_grad_(True)
    model(torch.tensor(zoo.sample_sequences()[:1]), use_cache=False).logits.square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=10.0).step()
    model.requires_grad_(False)


def test_after_training_requests_are_refused_until_the_weights_are_reloaded() -> None:
    model = zoo.draw("llama", zoo.FACTORS["llama"], seed=0)
    llm, before = LLM(model), expected(model)
    assert tokens(llm) == before
    trained(model)
    with pytest.raises(InvalidRequestError, match=r"weights have changed since.*reload_weights\(\)"):
        tokens(llm)
    llm.reload_weights()
    assert tokens(llm) == expected(model) != before


def test_a_parameter_of_another_dtype_than_the_rest_is_watched() -> None:
    model = zoo.draw("llama", zoo.FACTORS["llama"], seed=0).to(torch.bfloat16)
    model.model.norm.float()
    watched = WatchedWeights(model)
    assert not watched.have_changed
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    assert watched.have_changed


def test_a_model_that_is_moved_or_let_go_changes_nothing() -> None:
    model = zoo.draw("llama", zoo.FACTORS["llama"], seed=0)
    llm, before = LLM(model), expected(model)
    model.to(torch.float64)
    assert tokens(llm) == before
    del model
    assert tokens(llm) == before


def test_weights_are_reloaded_from_a_folder(tmp_path: Path) -> None:
    zoo.build("llama", seed=0).save_pretrained(tmp_path)
    llm = LLM(tmp_path, dtype="float32")
    stream = llm.stream([[1, 2, 3]], GREEDY)
    begun = next(stream).token_ids
    zoo.build("llama", seed=1).save_pretrained(tmp_path)
    assert tokens(llm) == expected(zoo.build("llama", seed=0))
    llm.reload_weights()
    held = begun + [token_id for delta in stream for token_id in delta.token_ids]
    assert held == zoo.plain_greedy(zoo.build("llama", seed=0), [1, 2, 3], 12)
    assert tokens(llm) == expected(zoo.build("llama", seed=1))
