"""After a restart: an image that was seen is neither encoded nor proved again."""

import copy
from pathlib import Path
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from inflight.execution.hf.model_class import encoders
from inflight.execution.multimodal import encoder_outputs, item_proofs
from inflight.execution.weights.prepacked_linear import PrepackedLinear, can_prepack
from inflight.prefix_store.inspection import damaged, stored_fingerprints
from tests.multimodal.models import image, with_processor
from tests.prefix_store.test_archive import moved

GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
LONG = 60.0


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The digests of items that were encoded."""
    encode, digests = encoder_outputs.encode, list[bytes]()

    def counting(model: Any, item: Any) -> Any:
        digests[:] = dict.fromkeys([*digests, item.digest])  # the first is encoded twice, to prepack its encoder
        return encode(model, item)

    monkeypatch.setattr(encoder_outputs, "encode", counting)
    monkeypatch.setattr(item_proofs, "encode", counting)
    return digests


def ask(llm: LLM, model_type: str, *texts: str) -> list[Any]:
    mark = "<boi>" if model_type == "gemma3" else "<image>"
    prompts = [
        {"prompt": text.replace("<image>", mark), "images": [image(1)] * text.count("<image>")} for text in texts
    ]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    if llm.engine._store is not None:
        llm.engine._store.flush(LONG)
    return [each.outputs[0] for each in outputs]


@pytest.mark.parametrize("model_type", ["llava", "gemma3"])
def test_an_image_is_not_encoded_again(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoded: list[bytes]
) -> None:
    monkeypatch.setenv("INFLIGHT_CACHE_PREPARATIONS", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(item_proofs, "is_faster_prepacked", lambda model: model_type == "llava")  # is prepacked
    model, processor = with_processor(model_type)
    copy.deepcopy(model).save_pretrained(tmp_path / "model")
    options: dict[str, Any] = {"tokenizer": processor, "block_size": 4, "num_blocks": 200}
    texts = ("The same <image> again, what is it?", "Another <image>?", "Two: <image><image>!")
    expected = ask(LLM(copy.deepcopy(model), **options), model_type, *texts)
    encoded.clear()
    prefixes = tmp_path / "prefixes"
    for number, once in enumerate((1, 0, 0)):
        llm = LLM(tmp_path / "model", prefix_cache_dir=prefixes, **options)
        assert ask(llm, model_type, texts[0]) == expected[:1]
        assert len(encoded) == once, "its keys and values are in the folder"
        assert (llm.engine.scheduler.persistence.num_restored_tokens > 0) == (number > 0)
        assert ask(llm, model_type, *texts[1:2]) == expected[1:2]
        assert len(encoded) == once, "or, behind another text, its encoder output"
        encoded.clear()
    assert ask(llm, model_type, texts[2]) == expected[2:]
    assert encoded == [b""], "several together, once"
    encoded.clear()
    again = LLM(tmp_path / "model", prefix_cache_dir=prefixes, **options)
    assert ask(again, model_type, texts[2]) == expected[2:]
    assert not encoded
    if can_prepack(again.engine.runner.model):
        modules = [module for each in encoders(again.engine.runner.model) for module in each.modules()]
        assert any(isinstance(each, PrepackedLinear) for each in modules) == (model_type == "llava")
    (stored,) = stored_fingerprints(prefixes)
    assert not list(damaged(stored))
    for path in stored.files():  # a damaged output is computed
        path.chmod(0o600)
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    llm = LLM(tmp_path / "model", prefix_cache_dir=prefixes, **options)
    assert ask(llm, model_type, texts[1]) == expected[1:2]
    assert len(encoded) == 1


def test_an_archive_has_no_encoder_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoded: list[bytes]
) -> None:
    monkeypatch.setenv("INFLIGHT_CACHE_PREPARATIONS", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, processor = with_processor("llava")
    copy.deepcopy(model).save_pretrained(tmp_path / "model")
    options: dict[str, Any] = {"tokenizer": processor, "block_size": 4, "num_blocks": 200}
    here, there = tmp_path / "here", tmp_path / "there"
    expected = ask(LLM(tmp_path / "model", prefix_cache_dir=here, **options), "llava", "The same <image> again?")
    moved(here, there)
    llm = LLM(tmp_path / "model", prefix_cache_dir=there, **options)
    encoded.clear()
    assert ask(llm, "llava", "The same <image> again?") == expected
    assert llm.engine.scheduler.persistence.num_restored_tokens > 0
    assert not encoded
    ask(llm, "llava", "Another <image>?")
    assert len(encoded) == 1, "a salted prompt may have made what another can ask for"
