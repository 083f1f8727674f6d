"""`TemplateReader`: divides a text into thoughts, content and tool calls by a response template.

Decides what white space belongs to: there is none at the edges of a thought, before a call, and at the end of an answer
that is more than plain content. A call is reported when it is certain where it ends: until then it may turn out not to
be one, and then its text is content, marks included. JSON says so itself. In other notations a value may contain what
looks like the end, so such a call waits for the next one, or for the end of the text: a closing mark in between that
belongs to nothing says that the value goes on.

A thought that is never closed ends where a call begins. That is certain at the end of the text only, so what follows in
the thought waits as long as it may be a call.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_parsing import response_templates as hf

from inflight.server.answers.call_parser import ObjectScanner
from inflight.server.answers.call_text import CallText, ReadCall
from inflight.server.answers.pieces import CallDelta, Piece, Thought
from inflight.server.answers.search_budget import SearchBudget

MOST_TRIED = 64
"""Marks of calls at which a thought that was not closed may end: each costs time that grows with the text."""


@dataclass(slots=True)
class _Call:
    """A call that has begun. Marks are matches in the text.

    Attributes:
        mark: its opening mark.
        searched: up to where closing marks were looked for.
        searched_in_thought: up to where the end of the thought that it is in was looked for.
        scanned: up to where `strings` has seen it.
        strings: knows where strings are, if it is JSON.
        first: the first closing mark.
        last: the one that leaves a well-formed call, so far.
        following: the opening mark of a call behind that.
        is_torn: whether behind `last` there is a closing mark that belongs to no call.
        end: the calls and where they end, once that is certain; no calls: it is none, and content up to there.
    """

    mark: Any
    searched: int
    searched_in_thought: int
    scanned: int
    strings: ObjectScanner
    first: Any = None
    last: Any = None
    following: Any = None
    is_torn: bool = False
    end: tuple[list[ReadCall] | None, int] | None = None


class TemplateReader:
    """Reads one text.

    Args:
        fields: what there may be, and the marks around it.
        begun: the part of the answer that the prompt has already; nothing of it is reported.
        thoughts: the names of fields of thoughts. All others but that of calls are content.
        calls: reads the text of calls; None: there is no field of calls.
        budget: the time for searches.
        is_parallel: whether there may be several calls; if not, all but the first are dropped.

    Attributes:
        num_calls: calls found so far.
    """

    def __init__(
        self,
        fields: Sequence[hf.ResponseTemplateField],
        begun: str,
        *,
        thoughts: Collection[str],
        calls: CallText | None,
        budget: SearchBudget,
        new_call_id: Callable[[], str],
        is_parallel: bool = True,
    ) -> None:
        self.num_calls = 0
        self._thoughts, self._calls, self._budget = thoughts, calls, budget
        self._new_call_id, self._is_parallel = new_call_id, is_parallel
        self._fields = fields
        self._implicit = next((field for field in fields if field.open_re is None), None)
        self._field = self._implicit  # of the text that comes now; None: it is dropped
        self._call: _Call | None = None
        self._num_tried = 0  # calls at the end of the text that are none, within a thought
        self._text, self._num_begun = begun, len(begun)
        self._position = 0  # up to which the text was told
        self._drops_space = False  # whether white space that comes now is not reported
        self._held = ""  # white space that is reported only if text follows
        self._is_new = True  # whether the present field has no text yet
        self._last: Any = None  # the field of the text that was reported last
        self._pieces: list[Piece] = []
        self._is_plain = True  # whether nothing but content was reported
        self._read(is_last=False)
        self._pieces.clear()
        self._is_plain, self._last = True, None
        self._is_anything_shown = False

    def feed(self, delta: str) -> list[Piece]:
        """Return the pieces that are certain now that the text has grown by `delta`."""
        self._text += delta
        self._read(is_last=False)
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """Return what was held back, at the end of the text."""
        self._read(is_last=True)
        if self._is_in_thought:
            self._held = ""
        rest = self._text[self._num_begun :]
        if self._is_plain and self._held:
            self._pieces.append(self._held)
        elif not self._is_anything_shown and self._implicit is None and rest.strip():
            self._pieces.append(rest)  # it stands outside of all marks, and must not be lost
        pieces, self._pieces = self._pieces, []
        return pieces

    # ------------------------------------------------------------------------------------- marks

    def _read(self, *, is_last: bool) -> None:
        while self._read_mark(is_last) if self._call is None else self._read_call(self._call, is_last):
            pass

    @property
    def _is_in_thought(self) -> bool:
        return self._field is not None and self._field.name in self._thoughts

    def _read_mark(self, is_last: bool) -> bool:
        """Tell the text up to the next mark, or to where one may begin; return whether there was one."""
        found = list[tuple[tuple[int, int, bool, str], Any, Any]]()
        end = len(self._text)
        for field, is_opening in self._watched():
            match, begin = self._find(field, self._position, is_last, is_opening=is_opening)
            if match is None:
                end = min(end, begin)
            else:
                key = (match.start(), -match.end(), not is_opening, field.name)  # the first, and the longest there
                found.append((key, field, match))
        best = min(found, default=None)
        if best is None or (best[0][0] >= end and not is_last):
            self._tell(end)
            return False
        (begin, _, is_closing, _), field, match = best
        is_empty = match.end() == self._position
        self._tell(begin)
        if not is_closing and self._calls is not None and field is self._calls.field:
            self._call = _Call(match, match.end(), match.end(), match.end(), ObjectScanner())
            return True
        self._move(match.end(), self._implicit if is_closing else field)
        return not (is_closing and is_empty)

    def _watched(self) -> Iterator[tuple[hf.ResponseTemplateField, bool]]:
        """The fields whose marks count here, and whether it is the opening or the closing mark."""
        field = self._field
        if field is not None and field.close_re is not None:
            yield field, False
        for each in self._fields:
            is_call = self._calls is not None and each is self._calls.field and self._is_in_thought
            if each.open_re is not None and (field is self._implicit or is_call):
                yield each, True

    def _find(
        self, field: hf.ResponseTemplateField, start: int, is_last: bool, *, is_opening: bool = False
    ) -> tuple[Any, int]:
        """Return the next such mark and where it ends; without one that is certain, None and where one may begin."""
        pattern, literals, may_grow = field.close_re, field.close_literals, field.close_literal_can_extend
        if is_opening:
            pattern, literals, may_grow = field.open_re, field.open_literals, field.open_literal_can_extend
        if pattern is None:
            return None, len(self._text)
        match = self._budget.search(field.name, pattern.search, self._text, start, partial=not is_last)
        if match is None:
            return None, len(self._text)
        is_at_end = match.end() == len(self._text) and (literals is None or may_grow or match.start() == match.end())
        if not is_last and (match.partial or is_at_end):
            return None, match.start()
        return match, match.end()

    def _move(self, position: int, field: hf.ResponseTemplateField | None) -> None:
        """Begin a field's text behind a mark."""
        was_in_thought, self._field = self._is_in_thought, field
        self._position, self._is_new = position, True
        if was_in_thought or self._is_in_thought:
            self._drops_space, self._held = True, ""

    # ------------------------------------------------------------------------------------- calls

    def _read_call(self, call: _Call, is_last: bool) -> bool:
        """Look for the end of a call; return whether it is certain what comes next."""
        assert self._calls is not None
        thought = self._field if self._is_in_thought else None
        if thought is not None:
            close, call.searched_in_thought = self._find(thought, call.searched_in_thought, is_last)
            if close is not None:
                self._call = None
                self._tell(close.start())
                self._move(close.end(), self._implicit)
                return True
            if self._calls.has_json_strings and not self._calls.may_begin(self._text, call.mark.end()):
                call.end = None, call.mark.end()
        call.end = call.end or self._end_of(call, self._calls, is_last)
        if call.end is None or (thought is not None and call.end[0] is not None and not is_last):
            return False
        self._call = None
        calls, end = call.end
        if thought is None:
            self._end_calls(calls, end)
        elif calls is None:
            self._num_tried += is_last
            self._tell(call.mark.end() if self._num_tried < MOST_TRIED else len(self._text))
        else:  # the thought was not closed
            self._tell(call.mark.start())
            self._move(call.mark.start(), self._implicit)
        return True

    def _end_of(self, call: _Call, form: CallText, is_last: bool) -> tuple[list[ReadCall] | None, int] | None:
        """Return a call's end if it is certain (see `_Call.end`)."""
        text, begin = self._text, call.mark.end()
        while True:
            close, call.searched = self._find(form.field, call.searched, is_last)
            if close is None:
                break
            call.searched += close.start() == close.end()
            call.first = call.first or close
            if not form.may_begin(text, begin, close.start()):
                return None, call.first.end()
            if form.has_json_strings:
                call.strings.feed(text[call.scanned : close.start()])
                call.scanned = close.start()
                if not call.strings.is_in_string:
                    calls = form.read(text, call.mark, close.start())
                    return calls, (close if calls else call.first).end()
                continue
            if call.last is not None and call.following is None and not call.is_torn:
                call.following = form.opening(text, call.last.end(), close)
            if call.following is not None:
                if form.may_end(text, call.following.end(), close.start()):
                    calls = form.read(text, call.mark, call.last.start())
                    if calls or not form.read(text, call.mark, close.start()):
                        return calls, call.last.end()
                    call.last, call.following = close, None
            elif form.may_end(text, begin, close.start()):
                call.last, call.is_torn = close, False
            else:
                call.is_torn = True
        if not is_last:
            return None
        if call.last is not None and not call.is_torn:
            return form.read(text, call.mark, call.last.start()), call.last.end()
        is_whole = call.last is None and form.field.content == "json"  # what ends the answer may be the closing mark
        calls = form.read(text, call.mark, len(text)) if is_whole else None
        is_over = calls is not None or call.first is None or not form.has_json_strings
        return calls, len(text) if is_over else call.first.end()

    # ------------------------------------------------------------------------------------- pieces

    def _tell(self, end: int) -> None:
        """Report the present field's text up to a position."""
        text, self._position = self._text[max(self._position, self._num_begun) : end], end
        if self._field is not None:
            self._show(self._field, text)

    def _show(self, field: Any, text: str) -> None:
        """Report text of a field, all but the white space at its end; None: of a call that is none."""
        if self._drops_space:
            text = text.lstrip()
        whole = self._held + text
        shown = whole.rstrip()
        self._held = whole[len(shown) :]
        if not shown:
            return
        self._drops_space, self._is_anything_shown = False, True
        if self._is_new and field is not None and field is self._last and field.join:
            shown = field.join + shown
        self._is_new, self._last = False, field
        is_thought = field is not None and field.name in self._thoughts
        self._is_plain = self._is_plain and not is_thought
        self._pieces.append(Thought(shown) if is_thought else shown)

    def _end_calls(self, calls: list[ReadCall] | None, end: int) -> None:
        begin, self._position = max(self._position, self._num_begun), end
        if calls is None:
            self._show(None, self._text[begin:end])
        elif end > self._num_begun:  # else the prompt has them
            self._held, self._is_plain, self._last, self._is_anything_shown = "", False, None, True
            for name, arguments in calls:
                if self._is_parallel or not self.num_calls:
                    self._pieces.append(CallDelta(self.num_calls, "", self._new_call_id(), name))
                    self._pieces.append(CallDelta(self.num_calls, arguments))
                    self.num_calls += 1
        self._is_new = True
