"""`receive_form`: streams a form's file to disk, so that its size costs no memory."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from inflight.batches.files import NewFile
from inflight.server.wire.api_errors import ApiError

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_FIELD_BYTES = 4096
MAX_FIELDS = 16

SECONDS_OF_SILENCE = 30.0
"""Seconds that a client may pause."""


@dataclass(slots=True)
class Form:
    """A received form.

    Attributes:
        filename: the client's name of the file; None: no file.
    """

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None


async def receive_form(
    content_type: str, chunks: AsyncIterator[bytes], file: NewFile, file_field: str, max_bytes: int
) -> Form:
    """Receive a form, and write its file's content.

    Args:
        content_type: the request's header.
        max_bytes: the most that the file may have.

    Raises:
        ApiError: the form is invalid, the file is too large, or the client is too slow.
        OSError: the disk is full.
    """
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or b"boundary" not in options:
        shown = content_type[:100]
        raise ApiError(415, f"the content type is {shown!r}; a file is sent as multipart/form-data", code="no_form")
    parts = _Parts(file_field, max_bytes)
    parser = MultipartParser(options[b"boundary"], parts.callbacks())
    try:
        async for chunk in _not_silent(chunks):
            parser.write(chunk)
            if parts.arrived:
                await asyncio.to_thread(file.write, b"".join(parts.arrived))
                parts.arrived.clear()
        parser.finalize()
    except FormParserError as error:
        raise ApiError(400, f"the form cannot be read: {error}") from error
    if not parts.is_complete:
        raise ApiError(400, "the form ends before its last boundary")
    return parts.form


async def _not_silent(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    while True:
        try:
            async with asyncio.timeout(SECONDS_OF_SILENCE):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError:
            message = f"nothing of the file came for {SECONDS_OF_SILENCE:g} seconds"
            raise ApiError(408, message, code="request_timeout", headers={"Connection": "close"}) from None
        yield chunk  # processing has no timeout


class _Parts:
    """Takes the parts of a form from the parser.

    Attributes:
        arrived: pieces of the file to write.
    """

    def __init__(self, file_field: str, max_bytes: int) -> None:
        self.form, self.arrived, self.is_complete = Form(), list[bytes](), False
        self._file_field, self._max_bytes, self._num_bytes = file_field, max_bytes, 0
        self._header, self._value, self._disposition = b"", b"", b""
        self._name, self._content, self._is_file = "", b"", False

    def callbacks(self) -> "MultipartCallbacks":
        """The parser's callbacks."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._take_header,
            "on_header_value": self._take_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._take_data,
            "on_part_end": self._end,
            "on_end": self._complete,
        }

    def _begin(self) -> None:
        self._disposition, self._content, self._is_file = b"", b"", False

    def _take_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _take_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        if self._name == self._file_field:
            if self.form.filename is not None:
                raise ApiError(400, f"the form has more than one {self._file_field}", param=self._file_field)
            self._is_file = True
            self.form.filename = options.get(b"filename", b"").decode(errors="replace") or "unnamed"

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if not self._is_file:
            self._content += data[start:end]
            if len(self._content) > MAX_FIELD_BYTES:
                raise ApiError(400, f"{self._name[:100]} has more than {MAX_FIELD_BYTES} bytes")
            return
        self._num_bytes += end - start
        if self._num_bytes > self._max_bytes:
            message = f"the file has more than {self._max_bytes} bytes, the most that this server takes"
            raise ApiError(413, message, param=self._file_field, code="file_too_large", headers={"Connection": "close"})
        self.arrived.append(data[start:end])

    def _end(self) -> None:
        if not self._is_file:
            self.form.fields[self._name] = self._content.decode(errors="replace")
            if len(self.form.fields) > MAX_FIELDS:
                raise ApiError(400, f"the form has more than {MAX_FIELDS} fields")

    def _complete(self) -> None:
        self.is_complete = True
