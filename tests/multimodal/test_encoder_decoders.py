"""Encoder-decoders that hear or see: a prompt is the decoder's, and the encoder reads a sound or an image alone; a long
sound in parts."""

import copy
import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from numpy.typing import NDArray
from openai import BadRequestError

from inflight import LLM, AsyncLLM, SamplingParams
from inflight.census.tiny_processors import random_image
from inflight.contracts.api.errors import InvalidRequestError
from inflight.text.processor import Processor
from inflight.text.transcription import transcription_prompt, windows
from tests.command import Command, command
from tests.multimodal.encoder_decoders import LANGUAGES, SECONDS, moonshine, trocr, whisper
from tests.multimodal.sounds import RATE, sound
from tests.server.serving import RunningServer
from tests.server.test_serve_command import served

__all__ = ["command"]

NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
ASKED = "<|startoftranscript|><|{}|><|transcribe|><|notimestamps|>"
SOUNDS = tuple(map(sound, range(3)))


@torch.no_grad()
def plain(samples: NDArray[np.float32], **asked: Any) -> list[int]:
    """What Whisper's own `generate` writes."""
    model, processor = whisper()
    inputs = processor(audio=samples, sampling_rate=RATE, return_tensors="pt")
    output = copy.deepcopy(model).generate(**inputs, task="transcribe", max_new_tokens=NUM_TOKENS, **asked)
    return list(output[0].tolist())


def text_of(token_ids: list[int]) -> str:
    return str(whisper()[1].tokenizer.decode(token_ids, skip_special_tokens=True))


@pytest.fixture(scope="module")
def llm() -> LLM:
    model, processor = whisper()
    return LLM(copy.deepcopy(model), processor, num_blocks=100, max_num_seqs=2)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    model, processor = whisper()
    with RunningServer(AsyncLLM(copy.deepcopy(model), processor, in_process=True), model_name="m") as running:
        yield running


def test_tokens_are_those_of_its_own_generate(llm: LLM) -> None:
    prompts = [
        {"prompt": ASKED.format(language), "audios": [each]} for language, each in zip(LANGUAGES, SOUNDS, strict=True)
    ]
    outputs = llm.generate([*prompts, *prompts], GREEDY, use_tqdm=False)
    expected = [plain(each, language=language) for language, each in zip(LANGUAGES, SOUNDS, strict=True)]
    assert [list(each.outputs[0].token_ids) for each in outputs] == expected * 2
    assert len(set(map(tuple, expected))) == len(expected)
    assert llm.model_info.executor == "generate"
    assert llm.model_info.input_modalities == ("audio",)
    assert not any("suppress" in note for note in llm.model_info.notes)


def test_an_empty_prompt_is_how_the_model_begins(llm: LLM) -> None:
    whisper()[1].get_decoder_prompt_ids(language="de", task="transcribe")  # changes the tokenizer
    (output,) = llm.generate({"prompt": "", "audios": [SOUNDS[0]]}, GREEDY, use_tqdm=False)
    tokenizer = whisper()[1].tokenizer
    begins = ["<|startoftranscript|>", "<|notimestamps|>"]
    assert output.prompt_token_ids == tokenizer.convert_tokens_to_ids(begins)


def test_what_it_cannot_take_is_refused(llm: LLM) -> None:
    for audios, message in (
        ([SOUNDS[0]] * 2, "reads one image or one sound with each prompt"),
        ([np.zeros((2 * SECONDS + 1) * RATE, np.float32)], "a sound has 5 seconds; the model hears 2 at a time"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            llm.generate({"prompt": "", "audios": audios}, GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="reads one image or one sound with each prompt; this one has none"):
        llm.generate({"prompt_token_ids": [5, 6]}, GREEDY, use_tqdm=False)


def wave(samples: NDArray[np.float32]) -> tuple[str, bytes]:
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="wav", subtype="FLOAT")
    return "a.wav", file.getvalue()


def test_transcriptions_in_a_language_and_in_that_of_the_sound(server: RunningServer) -> None:
    options: dict[str, Any] = {"model": "m", "extra_body": {"max_completion_tokens": NUM_TOKENS}}
    create = server.client.audio.transcriptions.create
    for each in SOUNDS:
        for language in LANGUAGES:
            done = create(file=wave(each), language=language, **options)
            assert done.text == text_of(plain(each, language=language)).lstrip()
        assert create(file=wave(each), **options).text == text_of(plain(each)).lstrip()
    model, processor = whisper()
    features = [processor(audio=each, sampling_rate=RATE, return_tensors="pt").input_features for each in SOUNDS]
    assert len({int(model.detect_language(each)) for each in features}) > 1
    before = whisper()[1].get_prompt_ids("Hi").tolist()
    asked = [*before, *processor.tokenizer.convert_tokens_to_ids([*ASKED.format("en").replace("><", "> <").split()])]
    inputs = processor(audio=SOUNDS[0], sampling_rate=RATE, return_tensors="pt")
    answer = copy.deepcopy(model).generate(**inputs, decoder_input_ids=torch.tensor([asked]), max_new_tokens=NUM_TOKENS)
    done = create(file=wave(SOUNDS[0]), language="en", prompt="Hi", **options)
    assert done.text == text_of(answer[0, -NUM_TOKENS:].tolist()).lstrip()
    with pytest.raises(BadRequestError, match="reads one image or one sound with each prompt"):
        server.client.completions.create(model="m", prompt="a")
    with pytest.raises(BadRequestError, match="file: the processor cannot ask for it: Unsupported language: klingon"):
        create(file=wave(SOUNDS[0]), language="klingon", **options)


def test_a_long_sound_is_heard_in_parts_cut_where_it_is_quiet(server: RunningServer) -> None:
    model, processor = whisper()
    loud, quiet = [SOUNDS[2][: int(seconds * RATE)] for seconds in (1.8, 1.7, 1.9, 0.4)], np.zeros(800, np.float32)
    samples = np.concatenate([each for part in loud for each in (part, quiet)])
    parts = windows(Processor(processor, model.config), samples)
    assert np.array_equal(np.concatenate(parts), samples)
    assert len(parts) == len(loud)
    assert max(map(len, parts)) <= SECONDS * RATE
    assert not any(part[-100:].any() or part[:100].any() for part in parts[1:-1])
    options: dict[str, Any] = {"model": "m", "language": "de", "file": wave(samples)}
    options["extra_body"] = {"max_completion_tokens": NUM_TOKENS}
    expected = "".join(text_of(plain(part, language="de")) for part in parts).lstrip()
    done = server.client.audio.transcriptions.create(**options)
    assert done.text == expected
    assert done.usage.output_tokens == NUM_TOKENS * len(parts)
    events: Any = list(server.client.audio.transcriptions.create(**options, stream=True))
    assert events[-1].text == "".join(event.delta for event in events[:-1]) == expected


@pytest.mark.parametrize("kind", ["audio", "image"])
def test_other_classes(kind: str) -> None:
    model, processor = moonshine() if kind == "audio" else trocr()
    sources = [random_image(number) for number in range(3)] if kind == "image" else SOUNDS
    start = model.config.decoder_start_token_id
    for text, prompt in (("", [start]), (processor.tokenizer.decode([start, 8, 9]), [start, 8, 9])):
        expected = []
        for source in sources:
            given = {"images": source} if kind == "image" else {"audio": source, "sampling_rate": RATE}
            inputs = processor(**given, return_tensors="pt")
            own = copy.deepcopy(model).generate(
                **inputs, decoder_input_ids=torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False
            )
            expected.append(own[0, -NUM_TOKENS:].tolist())
        llm = LLM(copy.deepcopy(model), processor, num_blocks=100, max_num_seqs=2)
        name = "images" if kind == "image" else "audios"
        outputs = llm.generate([{"prompt": text, name: [each]} for each in sources], GREEDY, use_tqdm=False)
        assert [list(each.outputs[0].token_ids) for each in outputs] == expected
        assert outputs[0].prompt_token_ids == prompt
        assert len(set(map(tuple, expected))) > 1


def test_commands_read_a_file(tmp_path: Path, command: Command) -> None:
    model, processor = whisper()
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    (tmp_path / "a.wav").write_bytes(wave(SOUNDS[1])[1])
    options = ["-m", tmp_path / "model", "--max-tokens", NUM_TOKENS, "--temperature", 0, "--audio", tmp_path / "a.wav"]
    done = command("generate", ASKED.format("zh"), *options)
    assert done.returncode == 0, done.stderr
    expected = text_of(plain(SOUNDS[1], language="zh"))
    assert done.stdout == f"{expected}\n"
    fields = {"language": "zh", "max_completion_tokens": NUM_TOKENS}
    with served(str(tmp_path / "model")) as (_, client):
        answer = client.post("/v1/audio/transcriptions", data=fields, files={"file": wave(SOUNDS[1])})
        assert answer.json()["text"] == expected.lstrip()


def test_a_processor_asks_in_its_own_way() -> None:
    """Cohere's gives token ids for a language, Canary's a text for two."""

    def ids(language: str, punctuation: bool = True) -> list[int]:
        return [1, len(language), int(punctuation)]

    def text(audio: Any, source_language: str = "en", tokenize: bool = True) -> list[str]:
        assert not tokenize
        return [f"<|{source_language}|>"]

    def prompt_of(**methods: Any) -> Any:
        inner = SimpleNamespace(tokenizer=SimpleNamespace(get_vocab=dict), **methods)
        processor: Any = SimpleNamespace(inner=inner, prompts_decoder=True, vocab_size=9)
        return lambda *asked: transcription_prompt(processor, *asked)

    assert prompt_of(get_decoder_prompt_ids=ids)(None, "de") == [1, 2, 1]
    with pytest.raises(InvalidRequestError, match="missing 1 required positional argument: 'language'"):
        prompt_of(get_decoder_prompt_ids=ids)(None, None)
    with pytest.raises(InvalidRequestError, match="a prompt is given, but the model's processor takes none"):
        prompt_of(get_decoder_prompt_ids=ids)("Hi", "de")
    assert prompt_of(apply_transcription_request=text)(None, "de") == "<|de|>"
    assert prompt_of(apply_transcription_request=text)(None, None) == "<|en|>"
    assert prompt_of()(None, None) == ""
    with pytest.raises(InvalidRequestError, match="a language is given"):
        prompt_of()(None, "de")
