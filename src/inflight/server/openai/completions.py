"""`POST /v1/completions`: reads prompts and formats their answers, whole and as a stream.

OpenAI's legacy API with vLLM's extensions.
"""

import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, cast

from fastapi import Request
from msgspec import Raw
from pydantic import Field
from starlette.responses import Response

from inflight.contracts.api.model_info import ModelInfo
from inflight.contracts.api.outputs import CompletionOutput, RequestOutput, TextDelta
from inflight.contracts.api.params import SamplingParams
from inflight.server.openai import logprobs
from inflight.server.openai.chunks import ChunkWriter, usage_of
from inflight.server.openai.sampling_fields import IGNORED, NOT_SUPPORTED_YET, SamplingFields
from inflight.server.serving.chat import stream
from inflight.server.serving.generation import Generation, generate, size_of_answer
from inflight.server.serving.service import Service, service_of
from inflight.server.serving.settings import ServerSettings
from inflight.server.serving.streams import attended
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.json_route import to_json
from inflight.server.wire.off_loop import off_loop
from inflight.server.wire.strict_model import Many

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""


class CompletionRequest(SamplingFields):
    """The body of a request.

    Attributes:
        prompt: a text, token ids, or a list of either.
        best_of: how many sequences to generate; the `n` with the highest cumulative log-probability are returned.
        echo: begin the text with the prompt's text.
        logprobs: how many of the likeliest tokens to report for each token.
        add_special_tokens: whether a text gets the special tokens that the tokenizer puts around it; null: yes.
        max_tokens: null: 16. With 0 nothing is generated, which with `echo` and `logprobs` scores the prompt.
    """

    NOT_SUPPORTED: ClassVar = {**NOT_SUPPORTED_YET, "suffix": ("",), "prompt_embeds": ()}
    IGNORED: ClassVar = IGNORED
    MAY_HAVE_MORE = True
    OF_OTHERS: ClassVar = {
        *("do_sample", "input", "max_completion_tokens", "max_output_tokens", "messages", "tools", "top_logprobs")
    }

    prompt: str | Many[int] | Many[str] | Many[Many[int]]
    best_of: Annotated[int, Field(ge=1)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    add_special_tokens: bool | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list, in whichever form they were sent. An empty list is one prompt of no tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt or isinstance(self.prompt[0], int):
            return [cast(list[int], self.prompt)]
        return self.prompt

    @property
    def num_answered(self) -> int:
        """Sequences that are returned for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def num_generated(self) -> int:
        """Sequences that are generated for each prompt."""
        return self.num_answered if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """Whether to return the best of several sequences."""
        return self.num_generated > self.num_answered

    @property
    def generates_nothing(self) -> bool:
        """Whether only the prompt is scored. The engine then generates one token, which is not returned."""
        return self.max_tokens == 0

    def sent_options(self, vocab_size: int) -> dict[str, Any]:
        sent = super().sent_options(vocab_size)
        if self.echo and self.logprobs is not None:
            sent["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return sent | {
            "n": self.num_generated,
            "max_tokens": (DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens) or 1,
            "logprobs": 0 if self.logprobs is None and self.is_ranked else self.logprobs,
        }

    def check(self, settings: ServerSettings) -> None:
        super().check(settings)
        if self.num_generated < self.num_answered:
            message = f"best_of is {self.best_of}; it must be at least n, which is {self.num_answered}"
            raise ApiError(400, message, param="best_of")
        if self.is_ranked and self.stream:
            raise ApiError(400, "best_of cannot be combined with stream: the best is known at the end", param="best_of")
        self.check_limits(best_of=settings.max_n, logprobs=settings.max_logprobs)


async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue prompts."""
    service = service_of(request)
    async with attended(request.receive, service.settings.request_timeout) as client:
        answer = await _prepared(body, service, len(await request.body()))
        if not body.stream:
            outputs = await generate(service, answer.generation, client)
            whole = await off_loop(size_of_answer(outputs), lambda: answer.whole(outputs))
            return Response(whole, media_type="application/json")
    return stream(service, answer.generation, _Chunks(answer))


async def _prepared(body: CompletionRequest, service: Service, size: int) -> "_Answer":
    service.adapter_of(body.model)
    info = await service.generating_info()
    params = await off_loop(size, lambda: _params(body, service, info))
    prompts = [  # one by one, so that a disconnect stops the rest
        await off_loop(size, partial(_token_ids, body, prompt, service, info)) for prompt in body.prompts
    ]
    service.check_num_scores(prompts, params)
    return await off_loop(size, lambda: _Answer(body, service, prompts, params))


def _params(body: CompletionRequest, service: Service, info: ModelInfo) -> SamplingParams:
    body.check(service.settings)
    service.check_num_sequences(len(body.prompts), body.num_generated, "prompt")
    return body.sampling_params(service.llm.get_default_sampling_params(), info.vocab_size)


def _token_ids(body: CompletionRequest, prompt: str | list[int], service: Service, info: ModelInfo) -> list[int]:
    token_ids = service.token_ids(prompt, info, "prompt", add_special_tokens=body.add_special_tokens is not False)
    return service.fitted(token_ids, info, "prompt", body.truncate_prompt_tokens)


class _Answer:
    """A completion.

    Args:
        prompts: the token ids of each.

    Attributes:
        head: the fields that the answer and each of its chunks begin with.
        echoes: for each prompt, the text that its choices begin with: as sent, or decoded from its token ids, special
            tokens included.
    """

    def __init__(
        self, body: CompletionRequest, service: Service, prompts: Sequence[list[int]], params: SamplingParams
    ) -> None:
        self.body, self._tokenizer = body, service.llm.tokenizer
        adapter, request_id = service.adapter_of(body.model), f"cmpl-{uuid.uuid4().hex}"
        self.generation = Generation(request_id, prompts, params, body.priority or 0, body.cache_salt, adapter)
        about = {"object": "text_completion", "created": int(time.time()), "model": service.name_of(adapter)}
        self.head = {"id": request_id, **about}
        self._is_text_echoed = isinstance(body.prompts[0], str) and body.truncate_prompt_tokens is None
        self.echoes = [""] * len(prompts)
        if body.echo and self._is_text_echoed:
            self.echoes = [str(prompt) for prompt in body.prompts]
        elif body.echo and self._tokenizer is not None:
            self.echoes = [self._tokenizer.decode(prompt, skip_special_tokens=False) for prompt in prompts]

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Return the answer in JSON."""
        choices: list[Raw] = []
        for output, echo in zip(outputs, self.echoes, strict=True):
            prompt = output.prompt_token_ids, output.prompt_logprobs or []
            for completion in self._best(output.outputs):
                offsets = self.offsets(output.prompt_token_ids, len(echo))
                choice = self.choice(len(choices), completion, offsets, 0, prompt, echo)
                choices.append(Raw(to_json(choice)))  # encoded one at a time
        usage = usage_of(outputs, num_left_out=int(self.body.generates_nothing))
        return to_json({**self.head, "choices": choices, "usage": usage, "system_fingerprint": None})

    def _best(self, completions: Sequence[CompletionOutput]) -> Sequence[CompletionOutput]:
        if not self.body.is_ranked:
            return completions
        ranked = sorted(completions, key=lambda each: -(each.cumulative_logprob or 0.0))
        return ranked[: self.body.num_answered]

    def choice(
        self,
        index: int,
        delta: CompletionOutput | TextDelta,
        offsets: logprobs.TextOffsets,
        num_shown: int,
        prompt: tuple[Sequence[int], logprobs.Positions] | None,
        echo: str = "",
    ) -> dict[str, Any]:
        """Return a choice, or its delta.

        Args:
            num_shown: how many characters of it were sent before.
            prompt: token ids and log-probabilities of its prompt; None: already sent.
        """
        body, nothing = self.body, self.body.generates_nothing
        token_ids, text = ([], echo) if nothing else (delta.token_ids, echo + delta.text)
        ending = {"finish_reason": "length", "stop_reason": None} if nothing else _ending(delta)
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None, **ending}
        if body.logprobs is not None:
            positions = [] if nothing else delta.logprobs or []
            end = None if delta.finish_reason is None else num_shown + len(text)
            own = logprobs.of_completion(token_ids, positions, body.logprobs, self._tokenizer, offsets, end)
            if prompt is not None and body.echo:
                of_prompt = logprobs.TextOffsets(self._tokenizer, skip_special_tokens=self._is_text_echoed)
                echoed = logprobs.of_completion(*prompt, body.logprobs, self._tokenizer, of_prompt)
                own = logprobs.joined(echoed, own)
            choice["logprobs"] = own
        if body.prompt_logprobs is not None and prompt is not None:
            choice["prompt_logprobs"] = logprobs.of_prompt(prompt[1])
        if body.return_token_ids:
            choice |= {"token_ids": token_ids, "prompt_token_ids": None if prompt is None else prompt[0]}
        return choice

    def offsets(self, prompt: Sequence[int], start: int) -> logprobs.TextOffsets:
        """Return a tracker of a choice's token offsets in its text."""
        skip = self.generation.params.skip_special_tokens
        return logprobs.TextOffsets(self._tokenizer, prompt, start, skip_special_tokens=skip)


class _Chunks(ChunkWriter):
    """Writes the chunks of one answer."""

    def __init__(self, answer: _Answer) -> None:
        self._answer, body, prompts = answer, answer.body, answer.generation.prompts
        super().__init__(answer.head, body.stream_options, sum(map(len, prompts)), int(body.generates_nothing))
        is_scored = body.logprobs is not None or body.prompt_logprobs is not None
        self._is_plain = not (body.echo or body.return_token_ids or body.generates_nothing or is_scored)
        self._num_shown = [0] * (len(prompts) * body.num_answered)  # characters of each choice
        self._offsets: dict[int, logprobs.TextOffsets] = {}  # of each choice that has begun
        self._prompt_logprobs: dict[int, logprobs.Positions] = {}  # they come with the first sequence's first delta

    def events_of(self, delta: TextDelta) -> bytes:
        index = delta.prompt_index * self._answer.body.num_answered + delta.index
        if not self._is_plain:
            return self.chunk(to_json(self._choice(index, delta)))
        if not delta.text and delta.finish_reason is None:
            return b""
        end = b',"logprobs":null,"finish_reason":null}'
        if delta.finish_reason is not None:
            end = b',"logprobs":null,' + to_json(_ending(delta))[1:]
        return self.chunk(b'{"index":%d,"text":%b%b' % (index, to_json(delta.text), end))

    def _choice(self, index: int, delta: TextDelta) -> dict[str, Any]:
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[delta.prompt_index] = delta.prompt_logprobs
        prompt, echo = None, ""
        if index not in self._offsets:
            token_ids, echo = (
                self._answer.generation.prompts[delta.prompt_index],
                self._answer.echoes[delta.prompt_index],
            )
            prompt = token_ids, self._prompt_logprobs.get(delta.prompt_index, [])
            self._offsets[index] = self._answer.offsets(token_ids, len(echo))
        choice = self._answer.choice(index, delta, self._offsets[index], self._num_shown[index], prompt, echo)
        self._num_shown[index] += len(choice["text"])
        return choice


def _ending(delta: CompletionOutput | TextDelta) -> dict[str, Any]:
    return {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
