"""Tool calls in OpenAI's form, as a whole message and piece by piece. Knows no parser states and no transport."""

from collections.abc import Iterable
from typing import Any

from inflight.contracts.outputs import FinishReason
from inflight.server.tools.call_parser import CallDelta, CallParser, Piece


def message_of(pieces: Iterable[Piece]) -> dict[str, Any]:
    """Return a whole answer's content and calls: a message without its role."""
    content = ""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, str):
            content += piece
        elif piece.name is not None:
            function = {"name": piece.name, "arguments": piece.arguments}
            calls.append({"id": piece.call_id, "type": "function", "function": function})
        else:
            calls[piece.index]["function"]["arguments"] += piece.arguments
    return {"content": content or None, "tool_calls": calls} if calls else {"content": content}


def delta_of(piece: Piece) -> dict[str, Any]:
    """Return a chunk's `delta`."""
    if isinstance(piece, str):
        return {"content": piece}
    return {"tool_calls": [_call_delta(piece)]}


def finish_reason_of(parser: CallParser, finish_reason: FinishReason | None) -> str | None:
    """Return the finish reason to report: "tool_calls" for an answer that ended by itself and has calls."""
    return "tool_calls" if parser.num_calls and finish_reason == "stop" else finish_reason


def _call_delta(piece: CallDelta) -> dict[str, Any]:
    if piece.name is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.call_id, "type": "function", "function": function}
