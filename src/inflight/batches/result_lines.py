"""The lines of OpenAI's result and error files."""

import uuid
from dataclasses import dataclass

import msgspec

ANSWERED = 200


@dataclass(frozen=True, slots=True)
class Result:
    """A request's result.

    Attributes:
        number: of its line in the job's file.
        is_error: whether it goes to the job's errors.
        line: of the job's results or errors, without its end.
        num_input_tokens, num_output_tokens: the answer's usage.
    """

    number: int
    is_error: bool
    line: bytes
    num_input_tokens: int = 0
    num_output_tokens: int = 0


def result_of_answer(number: int, custom_id: str, status: int, body: bytes) -> Result:
    """The result of a request answered or refused with this status and JSON body."""
    response = {"status_code": status, "request_id": uuid.uuid4().hex, "body": msgspec.Raw(body or b"null")}
    line = _line(custom_id, response, None)
    return Result(number, status != ANSWERED, line, *(_usage(body) if status == ANSWERED else (0, 0)))


def line_of_error(custom_id: str, code: str, message: str) -> bytes:
    """A line for an unanswered request."""
    return _line(custom_id, None, {"code": code, "message": message})


def _line(custom_id: str, response: dict[str, object] | None, error: dict[str, str] | None) -> bytes:
    line_id = f"batch_req_{uuid.uuid4().hex}"
    return msgspec.json.encode({"id": line_id, "custom_id": custom_id, "response": response, "error": error})


class _Usage(msgspec.Struct):
    """In the words of completions and chats, or of responses."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


def _usage(body: bytes) -> tuple[int, int]:
    usage = msgspec.json.decode(body, type=_Answer).usage or _Usage()
    return usage.prompt_tokens + usage.input_tokens, usage.completion_tokens + usage.output_tokens
