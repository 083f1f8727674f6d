"""An answer in OpenAI's form of a chat, as a whole message and piece by piece. Knows no parser states and no transport.

Thoughts go under both names that clients read: `reasoning_content`, DeepSeek's, and `reasoning`, vLLM's.
"""

from collections.abc import Iterable
from typing import Any

from inflight.contracts.outputs import FinishReason
from inflight.server.chat_format.template_reader import CallDelta, Piece, TemplateReader, Thought


def message_of(pieces: Iterable[Piece]) -> dict[str, Any]:
    """Return a whole answer's thoughts, content and calls: a message without its role."""
    content = thoughts = ""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, str):
            content += piece
        elif isinstance(piece, Thought):
            thoughts += piece.text
        elif piece.name is not None:
            function = {"name": piece.name, "arguments": piece.arguments}
            calls.append({"id": piece.call_id, "type": "function", "function": function})
        else:
            calls[-1]["function"]["arguments"] += piece.arguments
    thought = _thought(thoughts) if thoughts else {}
    return {"content": content or None, **thought, "tool_calls": calls} if calls else {"content": content, **thought}


def delta_of(piece: Piece) -> dict[str, Any]:
    """Return a chunk's `delta`."""
    if isinstance(piece, str):
        return {"content": piece}
    if isinstance(piece, Thought):
        return _thought(piece.text)
    return {"tool_calls": [_call_delta(piece)]}


def finish_reason_of(reader: TemplateReader, finish_reason: FinishReason | None) -> str | None:
    """Return the finish reason to report: "tool_calls" for an answer that ended by itself and has calls."""
    return "tool_calls" if reader.num_calls and finish_reason == "stop" else finish_reason


def _thought(text: str) -> dict[str, Any]:
    return {"reasoning": text, "reasoning_content": text}


def _call_delta(piece: CallDelta) -> dict[str, Any]:
    if piece.name is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.call_id, "type": "function", "function": function}
