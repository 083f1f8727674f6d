"""Sounds of prompts: opening them, the real processors, and the ways in which a prompt gives them."""

import base64
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from inflight import LLM, InvalidRequestError
from inflight.contracts.step.multimodal import MultimodalInputs
from inflight.entrypoints.inputs import ReadPrompt, read_prompt
from inflight.server.serving.items import place_items
from inflight.server.wire.strict_model import READING, RequestParsing
from inflight.text import media
from inflight.text.media import open_sound
from inflight.text.tokenizer import Tokenizer
from tests.multimodal.sounds import AUDIO_TOKEN, CHAT, RATE, file_of, reader, sound, sound_processor

NAMES = ["Qwen2Audio", "GlmAsr", "AudioFlamingo3", "Gemma3n", "MossTranscribeDiarize"]


def url(content: bytes, kind: str = "wav") -> str:
    return f"data:audio/{kind};base64,{base64.b64encode(content).decode()}"


def test_a_sound_is_opened_from_every_form(tmp_path: Path) -> None:
    samples = sound(0)
    wav = file_of(samples, subtype="FLOAT")
    (tmp_path / "a sound.wav").write_bytes(wav)
    forms: list[Any] = [wav, bytearray(wav), url(wav), tmp_path / "a sound.wav", str(tmp_path / "a sound.wav"), samples]
    forms += [(samples, RATE), samples.astype(np.float64), torch.from_numpy(samples), samples.tolist()]
    forms += [file_of(np.stack([samples + 0.1, samples - 0.1], axis=1), subtype="FLOAT")]
    for each in forms:
        opened = open_sound(each, RATE)
        assert opened.dtype == np.float32
        np.testing.assert_allclose(opened, samples, atol=1e-6)
    np.testing.assert_allclose(open_sound(file_of(samples, "flac"), RATE), samples, atol=1e-4)
    for kind in ("mp3", "ogg"):
        assert len(open_sound(file_of(samples, kind), RATE)) == pytest.approx(len(samples), abs=2000)


def test_a_sound_is_resampled() -> None:
    times = np.arange(44_100) / 44_100
    tone = np.sin(2 * np.pi * 440 * times).astype(np.float32)
    expected = np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)
    for form in (file_of(tone, rate=44_100, subtype="FLOAT"), (tone, 44_100)):
        opened = open_sound(form, RATE)
        assert len(opened) == RATE
        np.testing.assert_allclose(opened[1000:-1000], expected[1000:-1000], atol=1e-3)


def test_what_is_no_sound_is_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.wav").write_text("no sound")
    forms: list[tuple[Any, str]] = [
        (b"RIFF", "a sound cannot be read: it has no format that libsndfile knows"),
        (tmp_path / "page.wav", "page.wav' has no format that libsndfile knows"),
        (str(tmp_path / "absent.wav"), "No such file"),
        (tmp_path, "Is a directory"),
        (url(b"RIFF"), "it has no format"),
        ("data:audio/wav;base64,?", "a sound cannot be read"),
        (file_of(np.zeros(0, dtype=np.float32)), "a sound has no samples"),
        (np.zeros(0, dtype=np.float32), "a sound has no samples"),
        (np.array([np.nan, 0.0]), "samples that are not finite"),
        (np.zeros((2, 5)), "a sound is an array [2, 5] of float64; it must be [num_samples] of floats"),
        (np.zeros(5, dtype=np.int16), "a sound is an array [5] of int16"),
        ((np.zeros(5), 0), "that is too long"),
        (None, "a sound is an array [] of object"),
    ]
    for form, message in forms:
        with pytest.raises(InvalidRequestError) as caught:
            open_sound(form, RATE)
        assert message in str(caught.value)
    monkeypatch.setattr(media, "MAX_SAMPLES", 1000)
    for form, told in ((file_of(sound(0)), 8000), (sound(0), 8000), ((np.zeros(100), 8), 100)):
        with pytest.raises(InvalidRequestError, match=f"a sound has {told} samples at .* that is too long"):
            open_sound(form, RATE)


def test_a_long_sound_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    silence = file_of(np.zeros(media.MAX_SAMPLES // 2 + 1, dtype=np.float32), "flac")
    assert len(silence) < 2**20
    stereo = io.BytesIO()
    with soundfile.SoundFile(stereo, "w", RATE, 2, format="FLAC") as file:
        for _ in range(64):
            file.write(np.zeros((2**19, 2), dtype=np.float32))
        file.write(np.zeros((1, 2), dtype=np.float32))
    monkeypatch.delattr(soundfile.SoundFile, "read")
    with pytest.raises(InvalidRequestError, match="a sound has 33554433 samples at 16000 Hz in 2 channels"):
        open_sound(stereo.getvalue(), RATE)


def test_without_soundfile_a_sound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    with pytest.raises(InvalidRequestError, match="sounds need soundfile and soxr"):
        open_sound(b"RIFF", RATE)


@pytest.mark.parametrize("name", NAMES)
def test_the_processor_decides_about_placeholders_and_arrays(name: str) -> None:
    processor, own = sound_processor(name), reader(name)
    placeholder = own.of("audio").placeholder
    assert placeholder == AUDIO_TOKEN
    for samples in (sound(0), sound(1, seconds=29 if name == "Qwen2Audio" else 31)):
        text = f"What is {placeholder} this?"
        token_ids, inputs = own.read(text, sounds=[samples])
        plain = processor(text=text, audio=[samples], return_tensors="pt")
        assert token_ids == plain["input_ids"][0].tolist()
        (item,) = inputs.items
        token_id = processor.tokenizer.convert_tokens_to_ids(AUDIO_TOKEN)
        assert list(item.places) == [place for place, each in enumerate(token_ids) if each == token_id]
        assert item.kind == "audio"
        for key, given in plain.items():
            if key not in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"):
                array = item.arrays[key]
                found = np.frombuffer(array.data, array.dtype).reshape(array.shape)
                np.testing.assert_array_equal(found, given.numpy())
        assert not {"input_features", "input_features_mask", "padding_mask"} & inputs.arrays.keys()


@pytest.mark.parametrize("name", ["Qwen2Audio", "Gemma3n", "MossTranscribeDiarize"])
def test_each_of_several_sounds_is_read_alone(name: str) -> None:
    own, sounds = reader(name), [sound(0), sound(1), sound(0)]
    _, inputs = own.read("<audio> or <audio>? <audio>", sounds=sounds)
    for samples, item in zip(sounds, inputs.items, strict=True):
        _, alone = own.read(AUDIO_TOKEN, sounds=[samples])
        (single,) = alone.items
        assert (item.digest, item.arrays) == (single.digest, single.arrays)
        assert len(item.places) == len(single.places)
    first, second, third = inputs.items
    assert first.digest == third.digest != second.digest
    assert first.places[-1] < second.places[0] <= second.places[-1] < third.places[0]


def test_a_sound_is_refused_of_which_the_end_would_be_left_out() -> None:
    with pytest.raises(InvalidRequestError, match="a sound has 31 seconds; the model hears 30 at a time"):
        reader("Qwen2Audio").read(AUDIO_TOKEN, sounds=[sound(1, seconds=31)])


def test_wrong_numbers_of_sounds_are_refused() -> None:
    own = reader("Qwen2Audio")
    own.limits = {"audio": 2}
    with pytest.raises(InvalidRequestError, match=r"the prompt has 3 sounds; at most 2 are accepted \(limit_mm_per"):
        own.read("<audio>", sounds=[b"", b"", b""])
    with pytest.raises(InvalidRequestError, match="the processor cannot read the sounds: "):
        own.read("<audio>", sounds=[sound(0), sound(1)])
    with pytest.raises(InvalidRequestError, match="the model's processor reads no images"):
        own.read("<audio>", images=[b""])
    with pytest.raises(InvalidRequestError, match="the processor writes no placeholder tokens for one of the sounds"):
        reader("AudioFlamingo3").read("<audio>", sounds=[sound(0)[:100]])
    with pytest.raises(InvalidRequestError, match="Got 1 text but 2 audios; they must match 1:1"):
        reader("GlmAsr").read("<audio><audio>", sounds=[sound(0), sound(1)])


def tokenizer() -> Tokenizer:
    inner = sound_processor("Qwen2Audio").tokenizer
    inner.chat_template = CHAT
    return Tokenizer(inner, load_processor=lambda: reader("Qwen2Audio"))


def test_a_prompt_gives_sounds_in_every_form() -> None:
    samples, known = sound(0), tokenizer()
    content, wav = {"type": "text", "text": "What?"}, file_of(samples, subtype="FLOAT")
    chunk = {"data": base64.b64encode(wav).decode(), "format": "wav"}
    prompts: list[dict[str, Any]] = [
        {"prompt": "<s><audio>What?</s>", "audios": [samples]},
        {"messages": [{"role": "user", "content": [{"type": "audio", "audio": wav}, content]}]},
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": chunk}, content]}]},
    ]
    first, *others = (read_prompt(each, known) for each in prompts)
    assert first.multimodal is not None
    assert len(first.multimodal.items[0].places) == 12
    for each in others:
        assert isinstance(each.multimodal, MultimodalInputs)
        assert list(each.token_ids) == list(first.token_ids)
        assert [item.digest for item in each.multimodal.items] == [item.digest for item in first.multimodal.items]
    with pytest.raises(InvalidRequestError, match="the prompt has sounds: LlamaForCausalLM has no encoder for them"):
        LLM(num_blocks=16).generate([ReadPrompt(None, [5] * len(first.token_ids), None, first.multimodal)])


def test_a_servers_marks_become_placeholders() -> None:
    info = replace(LLM(num_blocks=16).model_info, input_modalities=("audio",))
    reading = RequestParsing()
    token = READING.set(reading)
    try:
        marks = [reading.mark("audio", url(b"a")), reading.mark("image", "data:image/png;base64,b")]
        text, items = place_items(f"A\n{marks[0]}\nB{marks[1]}", tokenizer(), info, "messages")
    finally:
        READING.reset(token)
    assert text == f"A{AUDIO_TOKEN}B\n[image omitted: it cannot be read here]\n"
    assert items == {"image": [], "audio": [url(b"a")], "video": []}
    assert reading.ignored == ["image"]
