"""`POST /v1/audio/transcriptions`: writes down what is said, as the answer to a chat with a sound and an instruction.

The processors of models that only transcribe write that chat themselves.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.responses import Response

from inflight.contracts.api.errors import InvalidRequestError
from inflight.contracts.api.model_info import ModelInfo
from inflight.contracts.api.outputs import RequestOutput, TextDelta
from inflight.server.chat_format.blocks import TextBlock
from inflight.server.openai.chat_request import ChatRequest
from inflight.server.openai.chunks import usage_of
from inflight.server.serving.chat import ChatAnswer, Events, answer_chat
from inflight.server.serving.service import RenderedChat, Service
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.forms import FILE, form
from inflight.server.wire.json_route import to_json, validated
from inflight.server.wire.strict_model import READING

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
    sound = await file.read()
    prompt, language = (fields.pop(name, None) or None for name in ("prompt", "language"))
    said = "" if language is None else f" The language is {language}."
    content = READING.get().mark("audio", sound) + (prompt or INSTRUCTION) + said
    body = validated(ChatRequest, {**fields, "messages": [{"role": "user", "content": content}]})
    response = await answer_chat(body, request, partial(_Transcription, (sound, prompt, language), answer_format))
    if answer_format == "text" and not body.stream:
        response.headers["content-type"] = "text/plain; charset=utf-8"
    return response


class _Transcription(ChatAnswer[ChatRequest]):
    """A transcription of (a file's bytes, by this prompt, in this language)."""

    ID, PARAM = "transcription-", "file"

    def __init__(self, asked: tuple[bytes, str | None, str | None], answer_format: str, *given: Any) -> None:
        self._asked, self._format = asked, answer_format
        super().__init__(*given)

    def written(self, service: Service, info: ModelInfo) -> RenderedChat:
        if "audio" not in info.input_modalities:
            raise ApiError(400, f"{info.model_class} reads no sounds here", param="model", code="model_not_supported")
        try:
            processor, (sound, prompt, language) = service.tokenizer.processor, self._asked
            text = processor.transcription_request(prompt, language)
            if text is None:
                return super().written(service, info)
            token_ids, multimodal = processor.read(text, sounds=[sound], add_special_tokens=False)
        except InvalidRequestError as error:
            raise ApiError(400, f"file: {error}", param="file") from error
        chat = self.body.for_template(service.settings)
        return RenderedChat(text, token_ids, chat, self.body.reasoning_options, multimodal)

    def done(self, output: RequestOutput) -> dict[str, Any]:
        """The whole text, and the usage."""
        blocks, counts = self.new_blocks(), usage_of([output])
        blocks.feed(output.outputs[0].text, is_last=True)
        names = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens", "total_tokens": "total_tokens"}
        usage = {"type": "tokens", **{new: counts[old] for old, new in names.items()}}
        return {"text": blocks.text_of(TextBlock), "usage": usage}

    def whole(self, output: RequestOutput) -> bytes:
        done = self.done(output)
        return to_json(done) if self._format == "json" else f"{done['text']}\n".encode()

    def events(self) -> Events:
        return _Events(self)


class _Events(Events):
    """Writes the events of one answer."""

    def __init__(self, answer: _Transcription) -> None:
        self._answer, self._blocks = answer, answer.new_blocks()

    def write(self, deltas: list[TextDelta]) -> bytes:
        grown = [each for delta in deltas for each in self._blocks.feed(delta.text, is_last=delta.output is not None)]
        texts = [each.added for each in grown if isinstance(each.block, TextBlock) and each.added]
        return b"".join(_event("delta", delta=each) for each in texts)

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        return _event("done", **self._answer.done(outputs[0]))


def _event(kind: str, **fields: Any) -> bytes:
    return b"data: " + to_json({"type": f"transcript.text.{kind}", **fields}) + b"\n\n"
