"""A tiny Voxtral in the files that its checkpoints have: a tokenizer in Mistral's own format, and no chat template."""

import base64
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, WhisperFeatureExtractor

from inflight import LLM, AsyncLLM, InvalidRequestError, SamplingParams
from inflight.census.sensitive import sensitive_model
from inflight.census.tiny_configs import model_class, tiny_config
from inflight.text import tokenizer_files
from inflight.text.tokenizer import Tokenizer
from inflight.text.tokenizer_files import read_tokenizer
from tests.multimodal.models import plain_answer
from tests.multimodal.sounds import RATE, file_of, sound
from tests.server.serving import RunningServer

NUM_SPECIAL = 100
NAMES = {1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]", 11: "<pad>", 24: "[AUDIO]", 25: "[BEGIN_AUDIO]"} | {
    0: "<unk>",
    34: "[TRANSCRIBE]",
}
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[INST]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'input_audio' or part.type == 'audio_url' %}[AUDIO]"
    "{% elif part.type == 'text' %}{{ part.text }}{% else %}{{ raise_exception('Only text and input_audio') }}"
    "{% endif %}{% endfor %}{% endif %}[/INST]{% endfor %}"
)
"""As mistral-common 1.13 writes it for such a tokenizer, in short."""
GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("voxtral")
    config = tiny_config("voxtral")
    config.audio_token_id, config.text_config.vocab_size = 24, NUM_SPECIAL + 256
    config.text_config.max_position_embeddings = 2048
    hidden_size = config.audio_config.hidden_size
    config.audio_config.update({"max_source_positions": 1500, "intermediate_size": 4 * hidden_size})
    sensitive_model(model_class("voxtral"), config)[0].save_pretrained(made)
    WhisperFeatureExtractor(feature_size=config.audio_config.num_mel_bins).save_pretrained(made)
    preprocessor = made / "preprocessor_config.json"
    preprocessor.write_text(json.dumps(json.loads(preprocessor.read_text()) | {"processor_class": "VoxtralProcessor"}))
    sizes = {
        "num_vocab_tokens": 256,
        "default_vocab_size": 256 + NUM_SPECIAL,
        "default_num_special_tokens": NUM_SPECIAL,
    }
    encoded = ((each, base64.b64encode(bytes([each])).decode()) for each in range(256))
    tekken = {
        "config": {"pattern": PATTERN, "version": "v7", **sizes},
        "vocab": [{"rank": each, "token_bytes": written, "token_str": None} for each, written in encoded],
        "special_tokens": [
            {"rank": each, "token_str": NAMES.get(each, f"<SPECIAL_{each}>"), "is_control": True}
            for each in range(NUM_SPECIAL)
        ],
    }
    (made / "tekken.json").write_text(json.dumps(tekken))
    return made


@pytest.fixture(scope="module")
def chatting(folder: Path) -> Path:
    """With a template, which mistral-common writes where it is installed."""
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def runs(token_ids: list[int]) -> list[tuple[int, int]]:
    """Each token id, with how often it follows itself."""
    return [(token_id, len(list(same))) for token_id, same in itertools.groupby(token_ids)]


def letters(text: str) -> list[tuple[int, int]]:
    return [(NUM_SPECIAL + each, 1) for each in text.encode()]


def test_a_tokenizer_in_mistrals_format_is_read(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "tekken.json").write_text((folder / "tekken.json").read_text())
    monkeypatch.setattr("transformers.integrations.mistral.tokenizer.is_mistral_common_available", lambda: False)
    tokenizer = read_tokenizer(str(tmp_path))
    assert tokenizer is not None
    assert runs(tokenizer.encode("Hi")) == [(1, 1), *letters("Hi")]
    assert tokenizer.ends() == {2: "tokenizer"}
    assert tokenizer.notes == (tokenizer_files.NO_CHATS,)
    with pytest.raises(InvalidRequestError, match="has no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "Hi"}])


def test_a_fast_tokenizer_is_preferred_to_mistral_commons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def from_pretrained(source: str, **options: Any) -> PreTrainedTokenizerBase:
        asked.update(options)
        raise OSError("enough")

    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tekken.json").write_text("{}")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", from_pretrained)
    with pytest.raises(Exception, match="enough"):
        read_tokenizer(str(tmp_path))
    assert asked["mistral_format"] is False


@pytest.fixture(scope="module")
def tokenizer(chatting: Path) -> Tokenizer:
    found = read_tokenizer(str(chatting))
    assert found is not None
    return found


def test_sounds_become_the_tokens_of_mistral_common(tokenizer: Tokenizer) -> None:
    short, long = sound(0, seconds=3), sound(1, seconds=31)
    parts = [{"type": "audio"}, {"type": "text", "text": "Hi"}, {"type": "audio"}]
    text = tokenizer.render_chat([{"role": "user", "content": parts}])
    assert text == "<s>[INST][AUDIO]Hi[AUDIO][/INST]"
    token_ids, inputs = tokenizer.processor.read(text, sounds=[short, long], add_special_tokens=False)
    heard = [(25, 1), (24, 375)], [(25, 1), (24, 750)]  # 12.5 tokens a second, of half a minute or more
    assert runs(token_ids) == [(1, 1), (3, 1), *heard[0], *letters("Hi"), *heard[1], (4, 1)]
    assert [item.arrays["input_features"].shape[::2] for item in inputs.items] == [(1, 3000), (2, 3000)]
    for samples, item in zip((short, long), inputs.items, strict=True):
        array = item.arrays["input_features"]
        num_windows, num_mel_bins, num_frames = array.shape
        padded = np.pad(samples, (0, num_windows * 30 * RATE - len(samples)))
        extractor = WhisperFeatureExtractor(feature_size=num_mel_bins)
        frames = extractor(padded, sampling_rate=RATE, truncation=False, padding=True).input_features[0]
        expected = frames.reshape(num_mel_bins, num_windows, num_frames).swapaxes(0, 1)
        np.testing.assert_array_equal(np.frombuffer(array.data, np.float32).reshape(array.shape), expected)
    for text in ("[AUDIO]", "no place"):
        with pytest.raises(InvalidRequestError, match="places for 2 sounds"):
            tokenizer.processor.read(text, sounds=[short, long])


@pytest.mark.parametrize("num_sounds", [1, 2])
def test_answers_are_those_of_the_plain_model(chatting: Path, plain: PreTrainedModel, num_sounds: int) -> None:
    llm = LLM(chatting, dtype="float32", num_blocks=200)
    assert (llm.model_info.executor, llm.model_info.input_modalities) == ("packed", ("audio",))
    sounds = [sound(0), sound(1, seconds=31)][:num_sounds]
    parts = [{"type": "audio", "audio": each} for each in sounds]
    (output,) = llm.chat([{"role": "user", "content": [*parts, {"type": "text", "text": "Who?"}]}], GREEDY)
    assert llm.tokenizer is not None
    text = "<s>[INST]" + "[AUDIO]" * num_sounds + "Who?[/INST]"
    inputs = dict(llm.tokenizer.processor.inner(text, sounds, add_special_tokens=False))
    assert list(output.outputs[0].token_ids) == plain_answer(plain, inputs, 6)
    assert output.prompt_token_ids is not None
    assert list(output.prompt_token_ids) == inputs["input_ids"][0].tolist()


@pytest.fixture(scope="module")
def plain(folder: Path) -> PreTrainedModel:
    from transformers import VoxtralForConditionalGeneration

    model: PreTrainedModel = VoxtralForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    return model


@pytest.mark.parametrize("language", [None, "en"])
def test_transcriptions(chatting: Path, plain: PreTrainedModel, language: str | None) -> None:
    llm = AsyncLLM(chatting, dtype="float32", in_process=True, num_blocks=200)
    with RunningServer(llm, model_name="m") as server:
        named = {} if language is None else {"language": language}
        file = ("a.wav", file_of(sound(0), subtype="FLOAT"))
        options: Any = {"model": "m", "file": file, "extra_body": {"max_completion_tokens": 6}, **named}
        found = server.client.audio.transcriptions.create(**options)
        assert server.llm.tokenizer is not None
        tokenizer = server.llm.tokenizer
        said = "" if language is None else "lang:en"
        text = f"<s>[INST][AUDIO][/INST]{said}[TRANSCRIBE]"
        inputs = dict(tokenizer.processor.inner(text, [sound(0)], add_special_tokens=False))
        assert runs(inputs["input_ids"][0].tolist())[:5] == [(1, 1), (3, 1), (25, 1), (24, 375), (4, 1)]
        assert found.text == tokenizer.decode(plain_answer(plain, inputs, 6)).lstrip()
        refused = server.http.post("/v1/audio/transcriptions", data={"prompt": "P"}, files={"file": file})
        assert "the model's processor takes none" in refused.json()["error"]["message"]
