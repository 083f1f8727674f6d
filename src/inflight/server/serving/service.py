"""`Service`: what every endpoint works with: the model, the operator's settings, who observes; and prompts made tokens.

Decides which names the model goes by and what fits into its context. Knows no endpoint.
"""

import asyncio

from fastapi import Request

from inflight.async_llm import AsyncLLM
from inflight.contracts.errors import InvalidRequestError
from inflight.contracts.model_info import ModelInfo
from inflight.contracts.structured_output import StructuredOutput
from inflight.inputs import Prompt, read_prompt
from inflight.server.serving.observer import RequestObserver
from inflight.server.serving.settings import ServerSettings
from inflight.server.tools.fields import ToolFields
from inflight.server.tools.tool_use import ToolUse, tool_use
from inflight.server.wire.api_errors import ApiError
from inflight.text.tokenizer import Tokenizer

LONG_TEXT = 20_000
"""Characters from which on a text is tokenized beside the event loop: it takes milliseconds."""


class Service:
    """One model, served.

    Attributes:
        start_time: when serving began, in seconds of Unix time; the model's `created`.
        running: ids of the requests that were handed to `llm` and have not ended.
    """

    def __init__(
        self, llm: AsyncLLM, settings: ServerSettings, observer: RequestObserver | None, start_time: int
    ) -> None:
        self.llm = llm
        self.settings = settings
        self.observer = observer or RequestObserver()
        self.start_time = start_time
        self.running: set[str] = set()

    async def abort_all(self) -> None:
        """Abort whatever runs: streams end with an error, other requests are answered with one (503)."""
        for request_id in tuple(self.running):
            await self.llm.abort(request_id)

    async def model_info(self) -> ModelInfo:
        """Of the engine, started if it has to be."""
        await self.llm.start()
        return self.llm.model_info

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises `ApiError` if the model has none."""
        if self.llm.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer; it takes and gives token ids only")
        return self.llm.tokenizer

    def tool_use(
        self, asked: ToolFields, content: StructuredOutput | None, chat_template: str | None = None
    ) -> ToolUse | None:
        """What a request needs so that the model can call tools; None if it can call none. See `tool_use`."""
        if not asked.tools and not asked.is_call_required:
            return None
        return tool_use(asked, content, self.tokenizer, chat_template, self.settings.tool_call_parser)

    def check_model(self, name: str | None) -> None:
        """Raise `ApiError` (404) unless `name` is one of the model's; None is any model."""
        settings = self.settings
        if name is not None and name != settings.model_name and name not in settings.model_aliases:
            message = f"there is no model {name[:200]!r}; this server has {settings.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def tokenize(
        self, prompt: Prompt, num_characters: int, param: str, *, add_special_tokens: bool = True
    ) -> list[int]:
        """The token ids of a prompt.

        Args:
            num_characters: about so long it is.
            param: the field that it came in.
            add_special_tokens: whether a text gets those that the tokenizer puts around it.

        Raises:
            ApiError: there are none (400).
        """

        def read() -> list[int]:
            if isinstance(prompt, str) and prompt and not add_special_tokens:
                return self.tokenizer.inner.encode(prompt, add_special_tokens=False, verbose=False)  # type: ignore[no-any-return]
            return list(read_prompt(prompt, self.llm.tokenizer)[1])

        try:
            return await asyncio.to_thread(read) if num_characters > LONG_TEXT else read()
        except InvalidRequestError as error:
            raise ApiError(400, f"{param}: {error}", param=param) from error

    def fitted(
        self, token_ids: list[int], info: ModelInfo, param: str, truncate_prompt_tokens: int | None = None
    ) -> list[int]:
        """The token ids that run. Raises `ApiError` if they do not fit into the context, or there are none."""
        if truncate_prompt_tokens is not None:
            token_ids = token_ids[-truncate_prompt_tokens:]
        if not token_ids:
            raise ApiError(400, f"{param} is empty; a prompt must have at least one token", param=param)
        if len(token_ids) >= info.max_model_len:
            raise ApiError(
                400,
                f"{param} has {len(token_ids)} tokens; this model's context is {info.max_model_len} tokens, and at "
                "least one of them must be left for the output",
                param=param,
                code="context_length_exceeded",
            )
        return token_ids

    def check_num_sequences(self, num_prompts: int, each: int, param: str) -> None:
        """Raise `ApiError` if so many prompts with so many sequences each are too much for one request."""
        limit = self.settings.max_num_sequences
        if num_prompts * each > limit:
            what = f"{num_prompts} prompts with {each} sequences each are {num_prompts * each} sequences"
            raise ApiError(400, f"{what}; this server takes at most {limit} in one request", param=param)


def service_of(request: Request) -> Service:
    """What the application was made with."""
    service: Service = request.app.state.service
    return service
