"""Reads OpenAI's batch files: one request in each line of JSON, with `custom_id`, `method`, `url` and `body`.

Validates lines, and orders requests so that those with a common prefix are neighbours. Endpoints validate bodies.

The lines of OpenAI's result and error files.
"""

import uuid
import zlib
from codecs import BOM_UTF8
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Annotated, BinaryIO

import msgspec

from inflight.batches.batch import LineError

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


MAX_LINE_BYTES = 32 * 2**20
MAX_CUSTOM_ID = 512
"""Characters of a request's id."""

PREFIX_LENGTHS = tuple(64 << step for step in range(11))
"""Lengths of hashed prefixes in bytes: requests that share their first 64 KiB run together, within those that share
their first 32 KiB, and so on."""


@dataclass(frozen=True, slots=True)
class RequestLine:
    """A request, and where it is in its file.

    Attributes:
        number: of its line, from 1.
        offset, num_bytes: of its line.
        prefix: a sort key by which requests for the same model with a common prefix are neighbours.
    """

    number: int
    offset: int
    num_bytes: int
    custom_id: str
    prefix: bytes


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    body: msgspec.Raw
    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CUSTOM_ID)]
    url: str
    method: str = "POST"


class _Body(msgspec.Struct):
    """The model, and the fields of a prompt in order."""

    model: msgspec.Raw = msgspec.Raw(b"")
    cache_salt: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    stream: bool | None = None

    @property
    def text(self) -> bytes:
        return b"".join(
            (self.cache_salt, self.tools, self.system, self.instructions, self.messages, self.prompt, self.input)
        )


def read_lines(file: BinaryIO, urls: Collection[str]) -> Iterator[RequestLine | LineError]:
    """Read a batch file from its start, a line at a time; empty lines are skipped. At most `MAX_LINE_BYTES` of a line
    are read; a longer line ends the file.

    Args:
        urls: accepted values of `url`.
    """
    number = offset = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if number == 1 and line.startswith(BOM_UTF8):  # as some editors write it
            line, offset = line.removeprefix(BOM_UTF8), len(BOM_UTF8)
        if len(line) > MAX_LINE_BYTES:
            yield LineError("line_too_long", f"it has more than {MAX_LINE_BYTES} bytes", number)
            return
        if line.strip():
            try:
                yield _request(line, number, offset, urls)
            except _WrongLine as wrong:
                yield LineError(wrong.code, str(wrong), number, wrong.param)
        offset += len(line)


def request_of(line: bytes) -> tuple[str, bytes]:
    """The url and the body of a validated line."""
    request = msgspec.json.decode(line, type=_Line)
    return request.url, bytes(request.body)


def prompt_of(body: bytes) -> bytes:
    """The beginning of a request's prompt, as raw JSON: requests that share it can share cached blocks. Empty for an
    invalid body."""
    try:
        return msgspec.json.decode(body, type=_Body).text
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return b""


class _WrongLine(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


def _request(line: bytes, number: int, offset: int, urls: Collection[str]) -> RequestLine:
    try:
        request = msgspec.json.decode(line, type=_Line)
    except msgspec.ValidationError as error:
        form = "a request has a custom_id, the method POST, a url and a body, and nothing else"
        raise _WrongLine("invalid_request", f"{error}; {form}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _WrongLine("invalid_json_line", f"it is not JSON: {error}") from error
    if request.method != "POST":
        raise _WrongLine("invalid_method", f"the method is {request.method[:100]!r}; it must be POST", "method")
    if request.url not in urls:
        listed = " or ".join(map(repr, urls))
        raise _WrongLine("invalid_url", f"the url is {request.url[:200]!r}; it must be {listed}", "url")
    try:
        body = msgspec.json.decode(request.body, type=_Body)
    except msgspec.ValidationError as error:
        raise _WrongLine("invalid_request", f"the body is wrong: {error}", "body") from error
    if body.stream:
        raise _WrongLine("invalid_request", "a request of a batch cannot stream", "body.stream")
    return RequestLine(number, offset, len(line), request.custom_id, _prefix(body))


def _prefix(body: _Body) -> bytes:
    """Checksums of the model's name and of the prompt's prefixes, the shortest first: prompts with a common prefix
    share the first ones. (Only the order of work depends on it.)"""
    text = body.text
    checksum, start, sums = 0, 0, [zlib.crc32(body.model).to_bytes(4, "big")]
    for end in PREFIX_LENGTHS:
        if end > len(text):
            break
        checksum = zlib.crc32(text[start:end], checksum)
        sums.append(checksum.to_bytes(4, "big"))
        start = end
    return b"".join(sums)
