"""Compaction: a conversation becomes its user's messages and one item with a summary, which the model writes."""

from typing import Any
from uuid import uuid4

from inflight.contracts.api.outputs import RequestOutput
from inflight.server.chat_format.blocks import TextBlock
from inflight.server.responses.answer import AnswerReader, ResponseAnswer, usage_of
from inflight.server.responses.request import (
    SUMMARY,
    InputItems,
    MessageItem,
    ResponsesRequest,
    encoded_reasoning,
    items_of,
    stored_items,
)
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.json_route import to_json

MAX_SUMMARY_TOKENS = 4096
PROMPT = (
    "Summarize this conversation for an assistant that continues it and sees only my messages and your summary: "
    "what was done and found, decisions, constraints, and what remains to be done. Write only the summary."
)


class CompactRequest(ResponsesRequest):
    """The body of a request."""

    input: str | InputItems | None = None  # type: ignore[assignment]

    @property
    def asked(self) -> ResponsesRequest:
        """The request that makes the model write the summary."""
        items = [*items_of(self.input or []), *items_of(PROMPT)]
        own = {"max_output_tokens": MAX_SUMMARY_TOKENS, "truncation": "auto", "tools": None}
        unused = dict.fromkeys(("stream", "background", "conversation", "tool_choice", "text"))
        return self.model_copy(update={**own, **unused, "input": items, "store": False})


class CompactAnswer(ResponseAnswer):
    """The compacted conversation, which the next request can take as its input."""

    ID = "cmp_"

    def __init__(self, body: ResponsesRequest, *others: Any, **stored: Any) -> None:
        try:  # the summary needs the tokens
            super().__init__(body.model_copy(update={"thinking_token_budget": 0}), *others, **stored)
        except ApiError as error:
            if error.code != "unsupported_value":
                raise
            super().__init__(body, *others, **stored)

    def whole(self, output: RequestOutput) -> bytes:
        reader = AnswerReader(self)
        reader.feed(output.outputs[0])
        read = reader.blocks
        if output.outputs[0].finish_reason == "length" or not read.text_of(TextBlock).strip():
            message = f"the model wrote no whole summary in {MAX_SUMMARY_TOKENS} tokens; the conversation is as it was"
            raise ApiError(500, message, code="compaction_failed")
        texts = [each["content"] for each in self.chat[:-1] if each["role"] == "user"]
        texts = [text for text in texts if not text.startswith(SUMMARY)]  # the new one has it
        summary = {
            "id": f"cmp_{uuid4().hex}",
            "type": "compaction",
            "encrypted_content": encoded_reasoning(read.text_of(TextBlock)),
        }
        return to_json(
            {
                "id": self.generation.request_id,
                "object": "response.compaction",
                "created_at": self.created_at,
                "output": [*stored_items([MessageItem(role="user", content=text) for text in texts]), summary],
                "usage": usage_of(output, self.num_reasoning_tokens(read) or 0),
            }
        )
