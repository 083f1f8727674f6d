"""`POST /v1/audio/transcriptions`: writes down what is said, as the answer to a chat with a sound and an instruction.

The processors of models that only transcribe write that chat themselves, or, for encoder-decoders such as Whisper, how
the answer begins. These hear a long sound in parts.
"""

from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.responses import Response

from inflight.contracts.api.errors import InvalidRequestError
from inflight.contracts.api.model_info import ModelInfo
from inflight.contracts.api.outputs import RequestOutput, TextDelta
from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.multimodal import MultimodalInputs
from inflight.entrypoints.inputs import ReadPrompt
from inflight.server.chat_format.blocks import TextBlock
from inflight.server.openai.chat_request import ChatRequest
from inflight.server.openai.chunks import usage_of
from inflight.server.serving.chat import ChatAnswer, Events, answer_chat
from inflight.server.serving.service import RenderedChat, Service, service_of
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.forms import FILE, form
from inflight.server.wire.json_route import to_json, validated
from inflight.server.wire.off_loop import off_loop
from inflight.server.wire.strict_model import READING
from inflight.text.transcription import BEGIN, languages, transcription_prompt, windows

INSTRUCTION = "Transcribe the audio."
FORMATS = ("json", "text")
NO_TEXTS = ("temperature", "stream", "seed", "top_p", "max_completion_tokens")
"""Fields that are numbers, or true or false."""
FORM = form(file=FILE)


async def transcribe(request: Request) -> Response:
    """Write down what is said in a sound."""
    await request.body()  # is read again
    fields: dict[str, Any] = dict(await request.form(max_files=1))
    file, answer_format = fields.pop("file", None), fields.pop("response_format", "json")
    if not isinstance(file, UploadFile):
        raise ApiError(400, "file is missing", param="file", code="missing_required_parameter")
    if answer_format not in FORMATS:
        message = f"response_format is {str(answer_format)[:100]!r}; it can be {' or '.join(map(repr, FORMATS))}"
        raise ApiError(400, message, param="response_format")
    for name in NO_TEXTS:
        with suppress(KeyError, msgspec.MsgspecError):
            fields[name] = msgspec.json.decode(fields[name])
    fields.setdefault("temperature", 0)
    sound, language = await file.read(), fields.pop("language", None) or None
    prompt = fields.pop("prompt", None) or None
    said = "" if language is None else f" The language is {language}."
    content = READING.get().mark("audio", sound) + (prompt or INSTRUCTION) + said
    body = validated(ChatRequest, {**fields, "messages": [{"role": "user", "content": content}]})
    service = service_of(request)
    service.adapter_of(body.model)
    info = await service.generating_info()
    if "audio" not in info.input_modalities:
        raise ApiError(400, f"{info.model_class} reads no sounds here", param="model", code="model_not_supported")
    try:
        processor = service.tokenizer.processor
        sounds = await off_loop(len(sound), lambda: windows(processor, sound))
        if language is None and (known := languages(processor)):
            language = await _language_of(sounds[0], known, service)
    except InvalidRequestError as error:
        raise ApiError(400, f"file: {error}", param="file") from error
    make = partial(_Transcription, (sounds, prompt, language), answer_format)
    response = await answer_chat(body, request, make, len(sound))
    if answer_format == "text" and not body.stream:
        response.headers["content-type"] = "text/plain; charset=utf-8"
    return response


async def _language_of(sound: Any, known: dict[str, int], service: Service) -> str:
    """The most probable of these languages, each with its token. Raises what `AsyncLLM.stream` does."""
    processor, likely = service.tokenizer.processor, dict.fromkeys(known.values(), 100.0)
    token_ids, multimodal = await off_loop(sound.nbytes, lambda: processor.read(BEGIN, sounds=[sound]))
    params = SamplingParams(temperature=0, max_tokens=1, logit_bias=likely, ignore_eos=True)
    async with aclosing(service.llm.stream(ReadPrompt(None, token_ids, None, multimodal), params)) as deltas:
        found = [token_id async for delta in deltas for token_id in delta.token_ids]
    return next((code for code, token_id in known.items() if token_id in found), "en")


class _Transcription(ChatAnswer[ChatRequest]):
    """A transcription of (a sound's parts, by this prompt, in this language)."""

    ID, PARAM = "transcription-", "file"

    def __init__(self, asked: tuple[list[Any], str | None, str | None], answer_format: str, *given: Any) -> None:
        self._asked, self._format = asked, answer_format
        self._rest: list[tuple[list[int], MultimodalInputs]] = []
        super().__init__(*given)
        prompts = [*self.generation.prompts, *(token_ids for token_ids, _ in self._rest)]
        items = [*self.generation.multimodal, *(each for _, each in self._rest)]
        self.generation = replace(self.generation, prompts=prompts, multimodal=items)

    def written(self, service: Service, info: ModelInfo) -> RenderedChat:
        service.check_num_sequences(len(self._asked[0]), 1, self.PARAM)
        processor, (sounds, prompt, language) = service.tokenizer.processor, self._asked
        try:
            text = transcription_prompt(processor, prompt, language)
            if text is None:
                return super().written(service, info)
            read = [processor.read(text, sounds=[sound], add_special_tokens=False) for sound in sounds]
        except InvalidRequestError as error:
            raise ApiError(400, f"file: {error}", param="file") from error
        (token_ids, multimodal), *self._rest = read
        chat = self.body.for_template(service.settings)
        return RenderedChat(str(text), token_ids, chat, self.body.reasoning_options, multimodal)

    def done(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole text, and the usage."""
        counts, texts = usage_of(outputs), []
        for output in outputs:
            blocks = self.new_blocks()
            blocks.feed(output.outputs[0].text, is_last=True)
            texts.append(blocks.text_of(TextBlock))
        names = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens", "total_tokens": "total_tokens"}
        usage = {"type": "tokens", **{new: counts[old] for old, new in names.items()}}
        return {"text": "".join(texts).lstrip(), "usage": usage}

    def whole(self, *outputs: RequestOutput) -> bytes:
        done = self.done(outputs)
        return to_json(done) if self._format == "json" else f"{done['text']}\n".encode()

    def events(self) -> Events:
        return _Events(self)


class _Events(Events):
    """Writes the events of one answer, its parts in order."""

    def __init__(self, answer: _Transcription) -> None:
        self._answer = answer
        self._blocks = [answer.new_blocks() for _ in answer.generation.prompts]
        self._texts, self._is_ended = [""] * len(self._blocks), [False] * len(self._blocks)  # not yet written
        self._begin, self._has_begun = 0, False

    def write(self, deltas: list[TextDelta]) -> bytes:
        for delta in deltas:
            self._is_ended[delta.prompt_index] = is_last = delta.output is not None
            for each in self._blocks[delta.prompt_index].feed(delta.text, is_last=is_last):
                self._texts[delta.prompt_index] += each.added if isinstance(each.block, TextBlock) else ""
        written = b""
        for number in range(self._begin, len(self._texts)):
            text, self._texts[number], self._begin = self._texts[number], "", number
            text = text if self._has_begun else text.lstrip()
            self._has_begun |= bool(text)
            written += _event("delta", delta=text) if text else b""
            if not self._is_ended[number]:
                break
        return written

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        return _event("done", **self._answer.done(outputs))


def _event(kind: str, **fields: Any) -> bytes:
    return b"data: " + to_json({"type": f"transcript.text.{kind}", **fields}) + b"\n\n"
