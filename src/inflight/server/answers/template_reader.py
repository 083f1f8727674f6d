"""`TemplateReader`: divides a text into thoughts, content and tool calls by a response template.

Decides what white space belongs to: there is none at the edges of a thought, before a call, and at the end of an answer
that is more than plain content. A call is reported when it is complete: until then it may turn out not to be one, and
then its text is content, marks included.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing import response_templates as hf

from inflight.server.answers.pieces import CallDelta, Piece, Thought


class ReadCall(NamedTuple):
    """A complete call; its arguments are JSON."""

    name: str
    arguments: str


class TemplateReader:
    """Reads one text.

    Args:
        template: takes every field for text.
        begun: the part of the answer that the prompt has already; nothing of it is reported.
        thoughts, calls: the names of their fields. All others are content.
        joins: what stands between two texts of a field that follow each other.
        is_whole_when_open: whether a call that the end of the text ends may be complete.
        read_calls: reads the text of calls, marks included; None: it has none that can be made.
        is_parallel: whether there may be several calls; if not, all but the first are dropped.

    Attributes:
        num_calls: calls found so far.
    """

    def __init__(
        self,
        template: hf.ResponseTemplate,
        begun: str,
        *,
        thoughts: Collection[str],
        calls: str,
        joins: Mapping[str, str],
        is_whole_when_open: bool,
        read_calls: Callable[[str], list[ReadCall] | None],
        new_call_id: Callable[[], str],
        is_parallel: bool = True,
    ) -> None:
        self.num_calls = 0
        self._fields, self._has_implicit_field = template.fields, template.implicit is not None
        self._thoughts, self._calls, self._joins = thoughts, calls, joins
        self._is_whole_when_open = is_whole_when_open
        self._read_calls, self._new_call_id, self._is_parallel = read_calls, new_call_id, is_parallel
        self._parser = ResponseParser(template, prefix=begun)
        self._text = begun  # all of it, because events do not say where they are
        self._num_begun = len(begun)
        self._position = 0  # up to which events have told
        self._opened = 0  # where the present field's mark begins
        self._drops_space = False  # whether white space that comes now is not reported
        self._held = ""  # white space that is reported only if text follows
        self._is_new = True  # whether the present field has no text yet
        self._last: str | None = None  # the field of the text that was reported last
        self._pieces: list[Piece] = []
        self._is_plain = True  # whether nothing but content was reported
        self._see(self._parser.initial_events)
        self._pieces.clear()
        self._is_plain, self._last = True, None
        self._is_anything_shown = False

    def feed(self, delta: str) -> list[Piece]:
        """Return the pieces that are certain now that the text has grown by `delta`."""
        self._text += delta
        self._see(self._parser.feed(delta))
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """Return what was held back, at the end of the text."""
        self._see(self._parser.finalize()[1])
        rest = self._text[self._num_begun :]
        if self._is_plain and self._held:
            self._pieces.append(self._held)
        elif not self._is_anything_shown and not self._has_implicit_field and rest.strip():
            self._pieces.append(rest)  # it stands outside of all marks, and must not be lost
        pieces, self._pieces = self._pieces, []
        return pieces

    # ------------------------------------------------------------------------------------- events

    def _see(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            field = self._fields[event["field"]]
            match event["type"]:
                case "region_open":
                    self._open(field)
                case "region_chunk":
                    self._add(field, event["text"])
                case _:
                    self._close(field)

    def _open(self, field: hf.ResponseTemplateField) -> None:
        self._is_new = True
        if field.name in self._thoughts:
            self._drop_space()
        self._opened = self._position
        if field.open_re is not None and (match := field.open_re.search(self._text, self._position)):
            self._opened, self._position = match.start(), match.end()

    def _add(self, field: hf.ResponseTemplateField, text: str) -> None:
        start = self._text.find(text, self._position)  # marks that were dropped may lie in between
        self._position = start + len(text)
        if field.name != self._calls:
            self._show(field.name, text[max(0, self._num_begun - start) :])

    def _close(self, field: hf.ResponseTemplateField) -> None:
        match = None if field.close_re is None else field.close_re.match(self._text, self._position)
        if match is not None:
            self._position = match.end()
        if field.name in self._thoughts:
            self._drop_space()
        elif field.name == self._calls:
            self._end_calls(self._text[self._opened : self._position], is_open=match is None)

    # ------------------------------------------------------------------------------------- pieces

    def _drop_space(self) -> None:
        self._drops_space, self._held = True, ""

    def _show(self, name: str | None, text: str) -> None:
        """Report text of a field, all but the white space at its end; None: of a call that is none."""
        if self._drops_space:
            text = text.lstrip()
        whole = self._held + text
        shown = whole.rstrip()
        self._held = whole[len(shown) :]
        if not shown:
            return
        self._drops_space, self._is_anything_shown = False, True
        if self._is_new and name is not None and name == self._last:
            shown = self._joins.get(name, "") + shown
        self._is_new, self._last = False, name
        is_thought = name in self._thoughts
        self._is_plain = self._is_plain and not is_thought
        self._pieces.append(Thought(shown) if is_thought else shown)

    def _end_calls(self, text: str, is_open: bool) -> None:
        if self._position <= self._num_begun:  # the prompt has it
            return
        calls = self._read_calls(text) if self._is_whole_when_open or not is_open else None
        if calls is None:
            self._show(None, text)
            return
        self._held, self._is_plain, self._last, self._is_anything_shown = "", False, None, True
        for name, arguments in calls:
            if self._is_parallel or not self.num_calls:
                self._pieces.append(CallDelta(self.num_calls, "", self._new_call_id(), name))
                self._pieces.append(CallDelta(self.num_calls, arguments))
                self.num_calls += 1
