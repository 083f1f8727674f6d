"""`CallParser`: splits a model's text, as it grows, into content and tool calls.

Decides when a piece of text is certain to be one or the other; the joined pieces do not depend on how the text was cut
into deltas. A call is an object with a tool's name and an object of arguments, which are passed on as written; anything
else is content, including its markers. White space at the edge of a call belongs to the call.

If a grammar guarantees calls, a call's arguments are returned as they arrive. Otherwise a call is returned only when it
is complete: until then it may turn out not to be one, and what was sent cannot be taken back.
"""

import re
from collections.abc import Callable, Collection

import msgspec

from inflight.server.answers.call_format import CallFormat, new_call_id
from inflight.server.answers.pieces import CallDelta, Piece

_OUTSIDE_STRINGS = re.compile(r'["{}\[\]]')
_INSIDE_STRINGS = re.compile(r'["\\]')


class CallParser:
    """Reads one text.

    Args:
        names: the names of the tools that may be called.
        is_guaranteed: whether a grammar makes the model begin calls as `head_of` does.
        is_parallel: whether there may be several calls; if not, all but the first are dropped.

    Attributes:
        num_calls: calls found so far.
    """

    def __init__(
        self, call_format: CallFormat, names: Collection[str], *, is_guaranteed: bool = False, is_parallel: bool = True
    ) -> None:
        self.num_calls = 0
        self._format = call_format
        self._names = frozenset(names)
        self._heads = {head_of(call_format, name): name for name in names} if is_guaranteed else {}
        self._is_parallel = is_parallel
        self._held = ""  # text that is not classified yet
        self._opened = ""  # what came before the object being read; content, if the object is not a call
        self._scanner = ObjectScanner()
        self._num_scanned = 0  # characters of the held text
        self._pieces: list[Piece] = []
        # The current state. It takes what it understands from the held text and returns whether to call the state again
        # (which may be another one by then).
        self._read: Callable[[], bool] = self._read_start if call_format.is_begin_optional else self._read_content

    def feed(self, delta: str) -> list[Piece]:
        """Return the pieces that are certain now that the text has grown by `delta`."""
        self._held += delta
        while self._read():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """Return what was held back, at the end of the text."""
        rest = self._opened + self._held
        is_markup = self._read in (self._read_arguments, self._read_closing)
        self._held = self._opened = ""
        if is_markup or (self.num_calls and not rest.strip()):
            return []
        return [rest] if rest else []

    # ------------------------------------------------------------------------------------- states

    def _read_start(self) -> bool:
        """Read leading white space."""
        text = self._held.lstrip()
        if not text:
            return False
        self._read = self._read_content
        if text[0] == "{":
            self._open_object(len(self._held) - len(text))
        return True

    def _read_content(self) -> bool:
        """Read up to the next marker, or to what may become one, with the white space before it."""
        begin = self._format.begin
        where = self._held.find(begin) if begin else -1
        length = where if where >= 0 else len(self._held) - _overlap(self._held, begin)
        length = len(self._held[:length].rstrip())
        self._give(self._held[:length])
        self._held = self._held[length:]
        if where < 0:
            return False
        self._opened, self._held = _cut(self._held, where - length + len(begin))
        self._read = self._read_opening
        return True

    def _read_opening(self) -> bool:
        """Read what follows a marker; if it is not an object, the marker was content."""
        text = self._held.lstrip()
        if (bracket := self._format.opening.strip()) and text.startswith(bracket):
            text = text[len(bracket) :].lstrip()
        if not text:
            return False
        if text[0] == "{":
            self._open_object(len(self._held) - len(text))
        else:
            self._reject(0)
        return True

    def _read_object(self) -> bool:
        """Read an object until it is complete, or until its arguments begin if it is certain to be a call."""
        for head, name in self._heads.items():
            if self._held.startswith(head):
                self._begin_call(name)
                self._held = self._held[len(head) :]
                self._scanner = ObjectScanner()
                self._read = self._read_arguments
                return True
        if any(head.startswith(self._held) for head in self._heads):
            return False
        num_scanned, self._num_scanned = self._num_scanned, len(self._held)
        end = self._scanner.feed(self._held[num_scanned:])
        if end is None:
            return False
        end += num_scanned
        # A bare object that only has a name may be anything; after a marker it is a call without arguments.
        call = _decoded(self._held[:end], "" if self._format.is_begin_optional else "{}")
        if call is None or call[0] not in self._names:
            self._reject(end)
            return True
        name, arguments = call
        self._begin_call(name)
        self._give_arguments(arguments)
        self._held = self._held[end:]
        self._read = self._read_closing
        return True

    def _read_arguments(self) -> bool:
        """Read the arguments of a call that is certain."""
        end = self._scanner.feed(self._held)
        arguments, self._held = _cut(self._held, len(self._held) if end is None else end)
        self._give_arguments(arguments)
        if end is None:
            return False
        self._read = self._read_closing
        return True

    def _read_closing(self) -> bool:
        """Read what follows a call: its end marker, another call, or content."""
        text = self._held.lstrip(" \t\r\n;,}" if self._heads else " \t\r\n;,")
        end = self._format.closing.strip() + self._format.end
        if text.startswith("{"):
            self._open_object(len(self._held) - len(text))
        elif end and text.startswith(end):
            self._held = text[len(end) :]
            self._read = self._read_content
        elif not text or end.startswith(text):
            return False
        else:
            self._read = self._read_content
        return True

    # ------------------------------------------------------------------------------------- shared by the states

    def _open_object(self, start: int) -> None:
        opened, self._held = _cut(self._held, start)
        self._opened += opened
        self._scanner = ObjectScanner()
        self._num_scanned = 0
        self._read = self._read_object

    def _reject(self, length: int) -> None:
        """Treat what was opened, and the first `length` held characters, as content after all."""
        text, self._held = _cut(self._held, length)
        self._give(self._opened + text)
        self._opened = ""
        self._read = self._read_content

    def _begin_call(self, name: str) -> None:
        self._opened = ""
        self.num_calls += 1
        if self._is_reported:
            self._pieces.append(CallDelta(self.num_calls - 1, "", new_call_id(self._format.call_id_length), name))

    def _give_arguments(self, text: str) -> None:
        if text and self._is_reported:
            self._pieces.append(CallDelta(self.num_calls - 1, text))

    @property
    def _is_reported(self) -> bool:
        return self._is_parallel or self.num_calls == 1

    def _give(self, content: str) -> None:
        if content:
            self._pieces.append(content)


class ObjectScanner:
    """Finds the end of a JSON object whose text arrives in pieces, without checking that it is valid JSON.

    Attributes:
        is_in_string: whether the text so far ends within a string.
    """

    def __init__(self) -> None:
        self.is_in_string = False
        self._depth = 0
        self._is_escaped = False

    def feed(self, text: str) -> int | None:
        """Return how many characters of `text` belong to the object; None: all of them, and more will follow."""
        position = 0
        while position < len(text):
            if self._is_escaped:
                self._is_escaped = False
                position += 1
                continue
            match = (_INSIDE_STRINGS if self.is_in_string else _OUTSIDE_STRINGS).search(text, position)
            if match is None:
                return None
            position = match.end()
            match match[0]:
                case "\\":
                    self._is_escaped = True
                case '"':
                    self.is_in_string = not self.is_in_string
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth <= 0:
                        return position
        return None


class _Written(msgspec.Struct):
    """A call, under either of the keys that models use."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


def head_of(call_format: CallFormat, name: str) -> str:
    """Return how a call begins that a grammar guarantees, up to its arguments."""
    return f'{{"name": {_quoted(name)}, "{call_format.arguments_key}": '


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _decoded(text: str, no_arguments: str) -> tuple[str, str] | None:
    """Return name and arguments as they were written; None: `text` is not a call."""
    try:
        written = msgspec.json.decode(text, type=_Written)
        arguments = (bytes(written.arguments) or bytes(written.parameters)).decode() or no_arguments
        return (written.name, arguments) if arguments.startswith("{") else None
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _cut(text: str, length: int) -> tuple[str, str]:
    return text[:length], text[length:]


def _overlap(text: str, marker: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
