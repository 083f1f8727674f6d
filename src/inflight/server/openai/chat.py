"""`POST /v1/chat/completions`: formats answers to chats, whole and as a stream."""

from collections.abc import Sequence
from typing import Any

from fastapi import Request
from msgspec import Raw
from starlette.responses import Response

from inflight.contracts.api.outputs import CompletionOutput, RequestOutput, TextDelta
from inflight.server.chat_format.blocks import BlockDelta, Blocks, CallBlock, ReasoningBlock, TextBlock
from inflight.server.openai import logprobs
from inflight.server.openai.chat_request import ChatRequest
from inflight.server.openai.chunks import ChunkWriter, usage_of
from inflight.server.serving.chat import ChatAnswer, answer_chat
from inflight.server.wire.json_route import to_json


async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a chat."""
    return await answer_chat(body, request, _Answer)


class _Answer(ChatAnswer[ChatRequest]):
    """A chat completion."""

    ID = "chatcmpl-"

    def head(self, kind: str) -> dict[str, Any]:
        """The leading fields of the answer and of each chunk."""
        return {
            "id": self.generation.request_id,
            "created": self.created_at,
            "model": self.model_name,
            "object": kind,
        }

    def usage(self, output: RequestOutput, read: Sequence[Blocks]) -> dict[str, Any]:
        is_predicted = self.body.prediction is not None
        return usage_of([output], is_predicted=is_predicted, num_reasoning_tokens=self.num_reasoning_tokens(*read))

    def logprobs(self, delta: CompletionOutput | TextDelta) -> dict[str, Any] | None:
        """Return `logprobs`, if requested."""
        num_top = self.body.num_logprobs
        if num_top is None:
            return None
        content = logprobs.of_chat(delta.token_ids, delta.logprobs or [], num_top, self.tokenizer)
        return {"content": content, "refusal": None}

    def finish_reason(self, ended: CompletionOutput | TextDelta, blocks: Blocks) -> str | None:
        """Return the finish reason: "tool_calls" for an answer that stopped and has calls."""
        return "tool_calls" if blocks.num_calls and ended.finish_reason == "stop" else ended.finish_reason

    def whole(self, output: RequestOutput) -> bytes:
        choices, read = list[Raw](), list[Blocks]()
        for completion in output.outputs:
            blocks = self.new_blocks()
            blocks.feed(completion.text, is_last=True)
            read.append(blocks)
            choices.append(Raw(to_json(self._choice(completion, blocks))))  # encoded one at a time
        answer = {
            **self.head("chat.completion"),
            "choices": choices,
            "usage": self.usage(output, read),
            "system_fingerprint": None,
        }
        if self.body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = logprobs.of_prompt(output.prompt_logprobs or [])
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        return to_json(answer)

    def _choice(self, completion: CompletionOutput, blocks: Blocks) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": completion.index,
            "message": {"role": "assistant", "refusal": None, **self._message(blocks)},
            "logprobs": self.logprobs(completion),
            "finish_reason": self.finish_reason(completion, blocks),
            "stop_reason": completion.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    def _message(self, blocks: Blocks) -> dict[str, Any]:
        content, text = blocks.text_of(TextBlock), blocks.text_of(ReasoningBlock)
        calls = [
            {"id": block.call_id, "type": "function", "function": {"name": block.name, "arguments": block.arguments}}
            for block in blocks.blocks
            if isinstance(block, CallBlock)
        ]
        reasoning = _both_names(text) if text and self.body.include_reasoning is not False else {}
        return {"content": content or (None if calls else ""), **reasoning, **({"tool_calls": calls} if calls else {})}

    def events(self) -> "_Chunks":
        return _Chunks(self)


def _both_names(text: str) -> dict[str, str]:
    """Reasoning under both of the names in use: vLLM's and DeepSeek's."""
    return {"reasoning": text, "reasoning_content": text}


class _Chunks(ChunkWriter):
    """Writes the chunks of one answer."""

    def __init__(self, answer: _Answer) -> None:
        self._answer, self._body, prompt = answer, answer.body, answer.generation.prompts[0]
        head = answer.head("chat.completion.chunk")
        if self._body.return_token_ids:
            head["prompt_token_ids"] = prompt
        super().__init__(head, self._body.stream_options, len(prompt))
        self._is_plain = self._body.num_logprobs is None and not self._body.return_token_ids
        self._has_begun = [False] * answer.generation.params.n
        self._read = [answer.new_blocks() for _ in self._has_begun]

    def usage_of(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return self._answer.usage(outputs[0], self._read)

    def events_of(self, delta: TextDelta) -> bytes:
        """Return a choice's events: the role first, then deltas, then the finish reason at the end."""
        events, is_text = b"", self._answer.form is None
        if delta.prompt_logprobs is not None and self._body.prompt_logprobs is not None:
            events = self.chunk(b"", prompt_logprobs=logprobs.of_prompt(delta.prompt_logprobs))
        if not self._has_begun[delta.index]:
            self._has_begun[delta.index] = True
            events += self._event(delta.index, {"role": "assistant", "content": "" if is_text else None})
        if not is_text:
            events += self._events_of_blocks(delta)
        elif not self._is_plain:
            events += self._event(delta.index, {"content": delta.text}, **self._extras(delta))
        elif delta.text:
            text = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}'
            events += self.chunk(text % (delta.index, to_json(delta.text)))
        if delta.finish_reason is not None:
            reason = self._answer.finish_reason(delta, self._read[delta.index])
            events += self._event(delta.index, {}, finish_reason=reason, stop_reason=delta.stop_reason)
        return events

    def _events_of_blocks(self, delta: TextDelta) -> bytes:
        """Return the deltas. Data of tokens goes with the first event."""
        blocks = self._read[delta.index]
        grown = blocks.feed(delta.text, is_last=delta.finish_reason is not None)
        deltas = [shown for growth in grown if (shown := self._delta(growth, blocks)) is not None]
        if self._is_plain:
            return b"".join(self._event(delta.index, each) for each in deltas)
        first, *others = deltas or [{}]
        events = self._event(delta.index, first, **self._extras(delta))
        return events + b"".join(self._event(delta.index, each) for each in others)

    def _delta(self, growth: BlockDelta, blocks: Blocks) -> dict[str, Any] | None:
        """Return a chunk's `delta`; None: nothing to show."""
        number, block, added, is_new = growth
        if isinstance(block, CallBlock):
            call: dict[str, Any] = {"index": blocks.num_calls_before(number), "function": {"arguments": added}}
            if is_new:
                call |= {"id": block.call_id, "type": "function", "function": {"name": block.name, "arguments": added}}
            return {"tool_calls": [call]}
        if not added or (isinstance(block, ReasoningBlock) and self._body.include_reasoning is False):
            return None
        return _both_names(added) if isinstance(block, ReasoningBlock) else {"content": added}

    def _extras(self, delta: TextDelta) -> dict[str, Any]:
        extras: dict[str, Any] = {"logprobs": self._answer.logprobs(delta)}
        if self._body.return_token_ids:
            extras["token_ids"] = delta.token_ids
        return extras

    def _event(self, index: int, delta: dict[str, Any], **others: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **others}
        return self.chunk(to_json(choice))
