"""`POST /v1/completions`: decides how prompts are answered, whole and as a stream."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from msgspec import Raw
from starlette.responses import Response

from inflight.contracts.model_info import ModelInfo
from inflight.contracts.outputs import CompletionOutput, RequestOutput, TextDelta
from inflight.contracts.params import SamplingParams
from inflight.server.openai import logprobs
from inflight.server.openai.chunks import ChunkWriter
from inflight.server.openai.completion_request import DEFAULT_MAX_TOKENS, CompletionRequest
from inflight.server.openai.usage import size_of_answer, usage_of
from inflight.server.serving.generation import Generation, generate
from inflight.server.serving.service import Service, service_of
from inflight.server.serving.streaming import stream
from inflight.server.wire.client import attended
from inflight.server.wire.json_route import JsonRoute, to_json
from inflight.server.wire.off_loop import off_loop
from inflight.text.tokenizer import Tokenizer

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue prompts."""
    service = service_of(request)
    async with attended(request.receive, service.settings.request_timeout) as client:
        prepared = await _prepare(body, service, len(await request.body()))
        if not body.stream:
            outputs = await generate(service, prepared.generation, client)
            return await off_loop(size_of_answer(outputs), lambda: _answer(prepared, outputs))
    return stream(service, prepared.generation, _Chunks(prepared))


@dataclass(frozen=True, slots=True)
class _PreparedCompletion:
    """A completion request that is ready to run.

    Attributes:
        echoes: for each prompt, the text that its choices begin with.
        is_text_echoed: whether that is the text that was sent; otherwise it is decoded from token ids, special tokens
            included.
        head: the fields that the answer and each of its chunks begin with.
    """

    body: CompletionRequest
    generation: Generation
    echoes: Sequence[str]
    is_text_echoed: bool
    tokenizer: Tokenizer | None
    head: dict[str, Any]


async def _prepare(body: CompletionRequest, service: Service, size: int) -> _PreparedCompletion:
    service.adapter_of(body.model)
    info = await service.generating_info()
    params = await off_loop(size, lambda: _params(body, service, info))
    prompts = [  # one by one, so that a client that leaves stops the rest
        await off_loop(size, partial(_token_ids, body, prompt, service, info)) for prompt in body.prompts
    ]
    service.check_num_scores(prompts, params)
    return await off_loop(size, lambda: _prepared(body, service, prompts, params))


def _params(body: CompletionRequest, service: Service, info: ModelInfo) -> SamplingParams:
    body.check(service.settings)
    service.check_num_sequences(len(body.prompts), body.num_generated, "prompt")
    wanted: int | None = body.logprobs
    return body.sampling_params(
        service.llm.get_default_sampling_params(),
        service.settings,
        info.vocab_size,
        n=body.num_generated,
        max_tokens=1 if body.generates_nothing else DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=0 if wanted is None and body.is_ranked else wanted,
        **({"prompt_logprobs": max(wanted, body.prompt_logprobs or 0)} if body.echo and wanted is not None else {}),
    )


def _token_ids(body: CompletionRequest, prompt: str | list[int], service: Service, info: ModelInfo) -> list[int]:
    token_ids = service.token_ids(prompt, info, "prompt", add_special_tokens=body.add_special_tokens is not False)
    return service.fitted(token_ids, info, "prompt", body.truncate_prompt_tokens)


def _prepared(
    body: CompletionRequest, service: Service, prompts: Sequence[list[int]], params: SamplingParams
) -> _PreparedCompletion:
    request_id = f"cmpl-{uuid.uuid4().hex}"
    is_text_echoed = isinstance(body.prompts[0], str) and body.truncate_prompt_tokens is None
    return _PreparedCompletion(
        body,
        Generation(request_id, prompts, params, body.priority or 0, body.cache_salt, service.adapter_of(body.model)),
        _echoes(body, prompts, is_text_echoed, service.llm.tokenizer),
        is_text_echoed,
        service.llm.tokenizer,
        {
            "id": request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.name_of(service.adapter_of(body.model)),
        },
    )


def _echoes(
    body: CompletionRequest, prompts: Sequence[list[int]], is_text_echoed: bool, tokenizer: Tokenizer | None
) -> list[str]:
    if not body.echo or tokenizer is None:
        return [""] * len(prompts)
    if is_text_echoed:
        return [str(prompt) for prompt in body.prompts]
    return [tokenizer.decode(prompt, skip_special_tokens=False) for prompt in prompts]


# ------------------------------------------------------------------------------------- whole answers


def _answer(prepared: _PreparedCompletion, outputs: Sequence[RequestOutput]) -> Response:
    choices: list[Raw] = []
    for output, echo in zip(outputs, prepared.echoes, strict=True):
        for completion in _best(output.outputs, prepared.body):
            choices.append(Raw(to_json(_choice(prepared, len(choices), output, completion, echo))))  # one at a time
    usage = usage_of(outputs, num_left_out=int(prepared.body.generates_nothing))
    answer = {**prepared.head, "choices": choices, "usage": usage, "system_fingerprint": None}
    return Response(to_json(answer), media_type="application/json")


def _best(completions: Sequence[CompletionOutput], body: CompletionRequest) -> Sequence[CompletionOutput]:
    if not body.is_ranked:
        return completions
    ranked = sorted(completions, key=lambda each: -(each.cumulative_logprob or 0.0))
    return ranked[: body.num_answered]


def _choice(
    prepared: _PreparedCompletion, index: int, output: RequestOutput, completion: CompletionOutput, echo: str
) -> dict[str, Any]:
    body, nothing = prepared.body, prepared.body.generates_nothing
    token_ids = [] if nothing else completion.token_ids
    choice: dict[str, Any] = {
        "index": index,
        "text": echo if nothing else echo + completion.text,
        "logprobs": None,
        "finish_reason": "length" if nothing else completion.finish_reason,
        "stop_reason": None if nothing else completion.stop_reason,
    }
    if body.logprobs is not None:
        echoed = (output.prompt_token_ids, output.prompt_logprobs or []) if body.echo else None
        positions = [] if nothing else completion.logprobs or []
        offsets = _offsets(prepared, output.prompt_token_ids, len(echo))
        choice["logprobs"] = _logprobs(prepared, token_ids, positions, offsets, echoed, len(choice["text"]))
    if body.prompt_logprobs is not None:
        choice["prompt_logprobs"] = logprobs.of_prompt(output.prompt_logprobs or [])
    if body.return_token_ids:
        choice |= {"token_ids": token_ids, "prompt_token_ids": output.prompt_token_ids}
    return choice


def _logprobs(
    prepared: _PreparedCompletion,
    token_ids: Sequence[int],
    positions: logprobs.Positions,
    offsets: logprobs.TextOffsets,
    echoed: tuple[Sequence[int], logprobs.Positions] | None,
    end: int | None,
) -> dict[str, Any]:
    """Return `logprobs` of an output's tokens, after the prompt's if echoed. (`end`: see `logprobs.of_completion`.)"""
    num_top, tokenizer = prepared.body.logprobs or 0, prepared.tokenizer
    own = logprobs.of_completion(token_ids, positions, num_top, tokenizer, offsets, end)
    if echoed is None:
        return own
    of_prompt = logprobs.TextOffsets(tokenizer, skip_special_tokens=prepared.is_text_echoed)
    return logprobs.joined(logprobs.of_completion(*echoed, num_top, tokenizer, of_prompt), own)


def _offsets(prepared: _PreparedCompletion, prompt: Sequence[int], start: int) -> logprobs.TextOffsets:
    skip = prepared.generation.params.skip_special_tokens
    return logprobs.TextOffsets(prepared.tokenizer, prompt, start, skip_special_tokens=skip)


# ------------------------------------------------------------------------------------- streams


class _Chunks(ChunkWriter):
    """Writes the chunks of one answer."""

    def __init__(self, prepared: _PreparedCompletion) -> None:
        body, prompts = prepared.body, prepared.generation.prompts
        num_prompt_tokens = sum(map(len, prompts))
        self._prepared = prepared
        super().__init__(prepared.head, body.stream_options, num_prompt_tokens, int(body.generates_nothing))
        is_scored = body.logprobs is not None or body.prompt_logprobs is not None
        self._is_plain = not (body.echo or body.return_token_ids or body.generates_nothing or is_scored)
        num_choices = len(prompts) * body.num_answered
        self._num_shown = [0] * num_choices  # characters of each choice
        self._offsets: dict[int, logprobs.TextOffsets] = {}  # of each choice that has begun
        self._prompt_logprobs: dict[int, logprobs.Positions] = {}  # they come with the first sequence's first delta

    def events_of(self, delta: TextDelta) -> bytes:
        index = delta.prompt_index * self._prepared.body.num_answered + delta.index
        if not self._is_plain:
            return self.chunk(to_json(self._choice(index, delta)))
        if not delta.text and delta.finish_reason is None:
            return b""
        end = b',"logprobs":null,"finish_reason":null}'
        if delta.finish_reason is not None:
            end = b',"logprobs":null,' + to_json(_ending(delta))[1:]
        return self.chunk(b'{"index":%d,"text":%b%b' % (index, to_json(delta.text), end))

    def _choice(self, index: int, delta: TextDelta) -> dict[str, Any]:
        prepared, body, nothing = self._prepared, self._prepared.body, self._prepared.body.generates_nothing
        is_first, prompt = index not in self._offsets, prepared.generation.prompts[delta.prompt_index]
        echo = prepared.echoes[delta.prompt_index] if is_first else ""
        if is_first:
            self._offsets[index] = _offsets(prepared, prompt, len(echo))
        text = "" if nothing else delta.text
        token_ids = [] if nothing else delta.token_ids
        choice: dict[str, Any] = {"index": index, "text": echo + text, "logprobs": None}
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[delta.prompt_index] = delta.prompt_logprobs
        if body.logprobs is not None:
            echoed = (prompt, self._prompt_logprobs[delta.prompt_index]) if is_first and body.echo else None
            positions = [] if nothing else delta.logprobs or []
            end = self._num_shown[index] + len(choice["text"]) if delta.finish_reason is not None else None
            choice["logprobs"] = _logprobs(prepared, token_ids, positions, self._offsets[index], echoed, end)
        self._num_shown[index] += len(choice["text"])
        if body.prompt_logprobs is not None and is_first:
            choice["prompt_logprobs"] = logprobs.of_prompt(self._prompt_logprobs[delta.prompt_index])
        if body.return_token_ids:
            choice |= {"token_ids": token_ids, "prompt_token_ids": prompt if is_first else None}
        return choice | ({"finish_reason": "length", "stop_reason": None} if nothing else _ending(delta))


def _ending(delta: TextDelta) -> dict[str, Any]:
    return {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
