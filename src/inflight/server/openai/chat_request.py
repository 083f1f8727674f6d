"""The request of `/v1/chat/completions`, and its conversion to the messages of chat templates. Knows no template."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from inflight.contracts.api.params import MAX_COUNT
from inflight.server.chat_format.chat_template import MAX_EFFORT, ReasoningOptions, reasoning_options_from
from inflight.server.chat_format.tools import ToolFields, call_for_template, with_names
from inflight.server.openai.sampling_fields import IGNORED, NOT_SUPPORTED_YET, SamplingFields
from inflight.server.serving.request_fields import ChatBody
from inflight.server.serving.settings import ServerSettings
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.strict_model import READING, HistoryModel, Many, StrictModel, of_type, text_part

MAX_MESSAGES = 2**14


class TextPart(HistoryModel):
    """A part of a message's content."""

    NOT_SUPPORTED: ClassVar = {"annotations": ([],), "cache_control": (), "prompt_cache_breakpoint": ()}

    type: Literal["text"]
    text: str


def text_of(content: str | list[Any] | None) -> str:
    """Return the text of a content: each part, of any type, on its own line (as in vLLM)."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


class Function(HistoryModel):
    """The function that a tool call names.

    Attributes:
        parsed_arguments: the arguments again, as `openai`'s client sends them back; ignored.
    """

    name: str
    arguments: str
    parsed_arguments: Any = None


class ToolCall(HistoryModel):
    """A call that the assistant made in an earlier turn.

    Attributes:
        index: the call's place in the stream that it came in; ignored.
    """

    id: str | None = None
    index: int | None = None
    type: Literal["function"] | None = None
    function: Function


def _function_call(text: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call of an unknown type as one of a function, so that its result follows a call."""
    kind = str(given.get("type"))
    own = given[kind] if isinstance(given.get(kind), dict) else {}
    name, arguments = (each if isinstance(each, str) else None for each in (own.get("name"), own.get("input")))
    return {
        "id": given.get("id"),
        "function": {"name": name or kind, "arguments": text if arguments is None else arguments},
    }


class Prediction(StrictModel):
    """A prediction of parts of the answer."""

    type: Literal["content"]
    content: str | Many[TextPart]


class Message(HistoryModel):
    """A message of a chat.

    Attributes:
        reasoning_content, reasoning: the assistant's reasoning, under either name; most chat templates leave it out
            unless tool calls follow it.
        parsed: the content again, as `openai`'s client sends it back; ignored.
        thinking_blocks, provider_specific_fields: the reasoning again, as LiteLLM sends it back; ignored.
    """

    NOT_SUPPORTED: ClassVar = {
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "refusal": ("",),
        "type": ("text", "message"),  # an evaluation harness sends it with every message
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[Annotated[TextPart, of_type("parts", "text", otherwise=text_part("text"))]] | None = None
    name: str | None = None
    tool_calls: (
        Many[Annotated[ToolCall, of_type("calls", "function", absent="function", otherwise=_function_call)]] | None
    ) = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    parsed: Any = None
    thinking_blocks: Any = None
    provider_specific_fields: Any = None

    def for_template(self, where: str) -> dict[str, Any]:
        """Return the message as templates expect it: "developer" becomes "system", arguments are parsed JSON. Raises
        `ApiError` if it has no content, is not the assistant's, and reading is strict."""
        if self.content is None and self.role != "assistant" and READING.get().is_strict:
            raise ApiError(400, f"{where} has no content", param=where)
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": text_of(self.content),
        }
        if self.name is not None:
            message["name"] = self.name
        if self.role == "assistant" and (reasoning := self.reasoning_content or self.reasoning):
            message["reasoning_content"] = reasoning
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [
                call_for_template(call.id, call.function.name, call.function.arguments) for call in self.tool_calls
            ]
        return message


class TemplateFields(StrictModel):
    """A chat, and how the chat template is applied to it.

    Attributes:
        add_generation_prompt: end with the beginning of the assistant's message; null: unless the last message is
            continued.
        continue_final_message: leave the last message open for the model to continue.
        chat_template: in Jinja, replaces the model's own, if the operator allows it.
        chat_template_kwargs: further variables of the template, such as `enable_thinking`.
    """

    messages: Annotated[Many[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def for_template(self, settings: ServerSettings) -> dict[str, Any]:
        """Return the chat as a prompt of `AsyncLLM`. Raises `ApiError` if the chat template cannot take it."""
        if self.chat_template is not None and not settings.trust_request_chat_template:
            message = "chat_template is given; this server takes only the model's own (--trust-request-chat-template)"
            raise ApiError(400, message, param="chat_template", code="unsupported_field")
        if self.add_generation_prompt and self.continue_final_message:
            message = "add_generation_prompt and continue_final_message are both true; they exclude each other"
            raise ApiError(400, message, param="continue_final_message")
        variables, begins = template_variables(self.chat_template_kwargs), self.add_generation_prompt
        return {
            "messages": with_names([each.for_template(f"messages[{i}]") for i, each in enumerate(self.messages)]),
            "add_generation_prompt": not self.continue_final_message if begins is None else begins,
            "continue_final_message": bool(self.continue_final_message),
            **({} if self.chat_template is None else {"chat_template": self.chat_template}),
            **variables,
        }


TEMPLATE_ARGUMENTS = {
    *("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
    *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
}
"""Names that `chat_template_kwargs` cannot set: they control the template's application and are not its variables."""


def template_variables(variables: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a prompt's part with `chat_template_kwargs`. Raises `ApiError` for reserved names."""
    for name in variables or ():
        if name in TEMPLATE_ARGUMENTS:
            message = f"chat_template_kwargs has {name!r}, which is not a variable of the template"
            raise ApiError(400, message, param="chat_template_kwargs")
    return {"chat_template_kwargs": variables} if variables else {}


class ChatRequest(SamplingFields, ToolFields, TemplateFields, ChatBody):
    """The body of a request.

    Attributes:
        logprobs: whether each token's log-probability is returned.
        top_logprobs: how many of the likeliest tokens are returned in addition at each position.
        max_completion_tokens, max_tokens: two names for one limit; if both are given, the first counts. Null: until a
            stop or the end of the context.
        reasoning_effort: how much the model should reason, if its chat template supports it; "none": not at all.
        thinking_token_budget: the most reasoning tokens; 0: no reasoning.
        include_reasoning: whether the answer includes the reasoning; null: yes.
    """

    NOT_SUPPORTED: ClassVar = {
        **NOT_SUPPORTED_YET,
        "add_special_tokens": (False,),
        "audio": (),
        "best_of": (1,),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "mm_processor_kwargs": (),
        "modalities": (["text"],),
        "moderation": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": ("in_memory", "in-memory"),
        "verbosity": ("medium",),
        "web_search_options": (),
    }
    IGNORED: ClassVar = IGNORED | {
        *("moderation", "verbosity"),
        *("prompt_cache_options", "prompt_cache_retention"),
    }
    MAY_HAVE_MORE = True
    OF_OTHERS: ClassVar = {
        *("do_sample", "input", "instructions", "max_output_tokens", "prompt", "stop_sequences", "system", "text")
    }

    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: int | None = None
    prediction: Prediction | None = None
    reasoning_effort: Annotated[str, Field(max_length=MAX_EFFORT)] | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    include_reasoning: bool | None = None

    @property
    def reasoning_options(self) -> ReasoningOptions:
        return reasoning_options_from(self.reasoning_effort, "reasoning_effort", self.thinking_token_budget)

    @property
    def predicted_text(self) -> str | None:
        """The text of the prediction, if sent."""
        if self.prediction is None:
            return None
        content = self.prediction.content
        return content if isinstance(content, str) else "".join(part.text for part in content)

    @property
    def tool_fields(self) -> ToolFields:
        return self

    @property
    def most_prompt_tokens(self) -> int | None:
        return self.truncate_prompt_tokens

    @property
    def num_logprobs(self) -> int | None:
        """The value of `SamplingParams.logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def sent_options(self, vocab_size: int) -> dict[str, Any]:
        most_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        own = {"max_tokens": most_tokens, "logprobs": self.num_logprobs, "prediction": self.predicted_text}
        return {**super().sent_options(vocab_size), **own}

    def for_template(self, settings: ServerSettings) -> dict[str, Any]:
        return super().for_template(settings) | self.template_tools

    def check(self, settings: ServerSettings) -> None:
        super().check(settings)
        self.check_limits(top_logprobs=settings.max_logprobs)
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs is given, but logprobs is not true", param="top_logprobs")


FIELDS_OF_CHATS = ChatRequest.model_fields.keys() | ChatRequest.NOT_SUPPORTED.keys() - ChatRequest.IGNORED
"""Fields of other APIs that change a chat's answer."""
