"""`TemplateReader`: divides a text into reasoning, content and tool calls by a response template.

White space at the edges of reasoning, before a call, and at the end of an answer with more than plain content is
dropped. A call is reported once its end is certain: until then it may turn out to be content, markers included. If a
grammar guarantees calls, their arguments are streamed. JSON is self-delimiting. In other notations a value may contain
the closing marker, so such a call waits for the next one, or for the end of the text: an unmatched closing marker in
between belongs to the value.

Unclosed reasoning ends where a call begins. That is certain only at the end of the text, so text after a possible call
in reasoning is held back.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import regex
from transformers.utils.chat_parsing import response_templates as hf

from inflight.server.chat_format.blocks import BlockDelta, Blocks, CallBlock, ReasoningBlock, TextBlock
from inflight.server.chat_format.call_text import Calls, CallText, ObjectScanner, SearchBudget

FIRST_OBJECT = regex.compile(r"\s*+(?P<list>\[\s*+)?+\{")
NEXT_OBJECT = regex.compile(r"[\s;,}]*+\{")
BEHIND_OBJECTS = regex.compile(r"[\s;,}]*+(?P<list>\])?+\s*+")

MOST_TRIED = 64
"""Most markers of calls tried as the end of unclosed reasoning: each costs time that grows with the text."""


@dataclasses.dataclass(slots=True)
class _Call:
    """A call that has begun. Marks are matches in the text.

    Attributes:
        mark: its opening mark.
        behind: where its text begins; in JSON behind the mark, or behind the last object.
        is_list: whether there is a list of objects.
        is_none: whether the last object of JSON is no call.
        is_streamed: whether the object is certainly a call, so that its arguments are streamed.
        searched: up to where closing marks were looked for.
        searched_in_reasoning: up to where the end of the reasoning that it is in was looked for.
        scanned: up to where `scanner` has seen the object.
        first: the first closing mark.
        last: the one that leaves a well-formed call, so far.
        following: the opening mark of a call behind that.
        is_torn: whether behind `last` there is a closing mark that belongs to no call.
        end: the calls and where they end, once that is certain; no calls: it is none, and content up to there.
    """

    mark: Any
    behind: int
    is_list: bool = False
    is_none: bool = False
    is_streamed: bool = False
    searched: int = 0
    searched_in_reasoning: int = 0
    scanned: int = 0
    scanner: ObjectScanner = dataclasses.field(default_factory=ObjectScanner)
    first: Any = None
    last: Any = None
    following: Any = None
    is_torn: bool = False
    end: tuple[Calls | None, int] | None = None

    def __post_init__(self) -> None:
        self.searched = self.searched_in_reasoning = self.scanned = self.behind


@dataclasses.dataclass(slots=True)
class _Edge:
    """Where the text that was reported ends.

    Attributes:
        field: of the text that was reported last.
        is_new: whether the present field has no text yet.
        held: white space that is reported only if text follows.
        drops_space: whether white space that comes now is not reported.
    """

    field: Any = None
    is_new: bool = True
    held: str = ""
    drops_space: bool = False


class TemplateReader(Blocks):
    """Reads one answer.

    Args:
        fields: the fields, with their markers.
        begun: the part of the answer already in the prompt; it is not reported.
        reasoning: the names of fields of reasoning. All others but that of calls are content.
        calls: reads the text of calls; None: there is no field of calls.
        budget: the time for searches.
        new_call_id: makes the id of a call, from its name and the number of calls before it.
        is_parallel: whether there may be several calls; if not, all but the first are dropped.
    """

    def __init__(
        self,
        fields: Sequence[hf.ResponseTemplateField],
        begun: str,
        *,
        reasoning: Collection[str],
        calls: CallText | None,
        budget: SearchBudget,
        new_call_id: Callable[[str, int], str],
        is_parallel: bool = True,
    ) -> None:
        super().__init__()
        self._reasoning, self._calls, self._budget = reasoning, calls, budget
        self._new_call_id, self._is_parallel = new_call_id, is_parallel
        self._fields = fields
        self._implicit = next((field for field in fields if field.open_re is None), None)
        self._field = self._implicit  # of the text that comes now; None: it is dropped
        self._call: _Call | None = None
        self._num_tried = 0  # calls at the end of the text that are none, within reasoning
        self._text, self._num_begun = begun, len(begun)
        self._position = 0  # up to which the text was reported
        self._edge = _Edge()
        self._is_dropped = False  # whether the present call is one too many
        self._read(is_last=False)
        super().__init__()
        self._edge.field = None

    @property
    def _is_first(self) -> bool:
        """Whether no content and no call was reported."""
        return all(isinstance(block, ReasoningBlock) for block in self.blocks)

    def _take(self, text: str, is_last: bool) -> None:
        """Report pieces that are certain after new text; at the end, also those held back."""
        self._text += text
        self._read(is_last=False)
        if not is_last:
            return
        self._read(is_last=True)
        if self._is_in_reasoning:
            self._edge.held = ""
        rest = self._text[self._num_begun :]
        if self._edge.held and all(isinstance(block, TextBlock) for block in self.blocks):
            self._add(TextBlock, self._edge.held)
        elif not self.blocks and self._implicit is None and rest.strip():
            self._add(TextBlock, rest)  # it stands outside of all marks, and must not be lost

    # ------------------------------------------------------------------------------------- marks

    def _read(self, *, is_last: bool) -> None:
        while self._read_mark(is_last) if self._call is None else self._read_call(self._call, is_last):
            pass

    @property
    def _is_in_reasoning(self) -> bool:
        return self._field is not None and self._field.name in self._reasoning

    def _read_mark(self, is_last: bool) -> bool:
        """Report the text up to the next marker, or to where one may begin; return whether there was one."""
        found = list[tuple[tuple[int, int, bool, str], Any, Any]]()
        end = len(self._text)
        for field, is_opening in self._watched():
            match, begin = self._find(field, self._position, is_last, is_opening=is_opening)
            if field is self._implicit and self._text[self._position : match.start() if match else begin].strip():
                continue
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
            self._call = _Call(match, match.end())
            return True
        self._move(match.end(), self._implicit if is_closing else field)
        return not (is_closing and is_empty)

    def _watched(self) -> Iterator[tuple[hf.ResponseTemplateField, bool]]:
        """The fields whose marks count here, and whether it is the opening or the closing mark. What closes the field
        without an opening mark ends a group of calls, and counts only behind them."""
        field = self._field
        is_behind_calls = self.num_calls > 0 and self._edge.field is None
        if field is not None and field.close_re is not None and (field is not self._implicit or is_behind_calls):
            yield field, False
        for each in self._fields:
            is_call = self._calls is not None and each is self._calls.field and self._is_in_reasoning
            if each.open_re is not None and (field is self._implicit or is_call):
                yield each, True

    def _find(
        self, field: hf.ResponseTemplateField, start: int, is_last: bool, *, is_opening: bool = False
    ) -> tuple[Any, int]:
        """Return the next such mark and where it ends; without one that is certain, None and where one may begin."""
        pattern, literals, may_grow = field.close_re, field.close_literals, field.close_literal_can_extend
        if is_opening:
            pattern, literals, may_grow = field.open_re, field.open_literals, field.open_literal_can_extend
            if self._calls is not None and field is self._calls.field and self._is_first and not self._is_in_reasoning:
                pattern = self._calls.open_first
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
        was_in_reasoning, self._field = self._is_in_reasoning, field
        self._position, self._edge.is_new = position, True
        if was_in_reasoning or self._is_in_reasoning:
            self._edge.drops_space, self._edge.held = True, ""

    # ------------------------------------------------------------------------------------- calls

    def _read_call(self, call: _Call, is_last: bool) -> bool:
        """Look for the end of a call; return whether the text after it is certain."""
        assert self._calls is not None
        if not self._is_in_reasoning:
            if self._calls.is_json:
                return self._read_objects(call, self._calls, is_last)
            if (end := self._end_of(call, self._calls, is_last)) is not None:
                self._call = None
                self._end_calls(*end)
            return end is not None
        assert self._field is not None
        close, call.searched_in_reasoning = self._find(self._field, call.searched_in_reasoning, is_last)
        if close is not None:
            self._call = None
            self._tell(close.start())
            self._move(close.end(), self._implicit)
            return True
        read = self._object_of if self._calls.is_json else self._end_of
        call.end = call.end or read(call, self._calls, is_last)
        if call.end is None or (call.end[0] is not None and not is_last):
            return False
        self._call = None
        if call.end[0] is None:
            self._num_tried += is_last
            self._tell(call.mark.end() if self._num_tried < MOST_TRIED else len(self._text))
        else:  # the reasoning was not closed
            self._tell(call.mark.start())
            self._move(call.mark.start(), self._implicit)
        return True

    def _read_objects(self, call: _Call, form: CallText, is_last: bool) -> bool:
        """Read the next object of JSON, or what stands behind the last one."""
        text, end = self._text, call.behind
        if call.is_streamed:
            more = call.scanner.feed(text[call.scanned :])
            end = len(text) if more is None else call.scanned + more
            self._give_arguments(text[call.scanned : end])
            call.scanned = self._position = end
            if more is not None:
                self._call = _Call(call.mark, end, call.is_list)
            return more is not None
        if not call.is_none and (end == call.mark.end() or "name" not in call.mark.groupdict()):
            found = self._object_of(call, form, is_last)
            if found is None:
                return call.is_streamed
            if found != (None, end) or end == call.mark.end():
                self._end_calls(*found)
                self._call = _Call(call.mark, found[1], call.is_list, is_none=found[0] is None)
                return True
        close, begin = self._find(form.field, end, is_last=False)
        behind = BEHIND_OBJECTS.match(text, end)
        if (begin if close is None else close.start()) <= behind.end():
            if close is None and not is_last:
                return False
            end = len(text) if close is None else close.end()
        elif behind["list"] and call.is_list:
            end = behind.end("list")
        self._call = None
        self._end_calls(None if call.is_none else [], end)
        return True

    def _object_of(self, call: _Call, form: CallText, is_last: bool) -> tuple[Calls | None, int] | None:
        """Return the next JSON object and its end, if that is certain (see `_Call.end`)."""
        text, is_first = self._text, call.behind == call.mark.end()
        begun = (FIRST_OBJECT if is_first else NEXT_OBJECT).match(text, call.behind, partial=not is_last)
        if begun is None:
            return None, call.behind
        if begun.partial:
            return None
        begin, call.is_list = begun.end() - 1, call.is_list or (is_first and begun["list"] is not None)
        if not self._is_in_reasoning and begin >= self._num_begun:
            marked, heads = call.mark.groupdict().get("name"), form.heads
            if marked is not None:
                heads = {"": marked} if marked in heads.values() else {}
            for head, name in heads.items():
                given = text[begin : begin + len(head)]
                if given == head:
                    self._begin_call(name)
                    call.is_streamed, call.scanned = True, begin + len(head)
                if call.is_streamed or (head.startswith(given) and not is_last):
                    return None
        call.scanned = max(call.scanned, begin)
        while True:
            close, call.searched = self._find(form.field, call.searched, is_last)
            until = call.searched if close is None else close.start()
            if (length := call.scanner.feed(text[call.scanned : until])) is not None:
                end = call.scanned + length
                return form.read(call.mark, text[begin:end], is_in_list=call.is_list), end
            call.scanned = max(call.scanned, until)
            if close is None and not is_last:
                return None
            call.first = call.first or close
            if close is None or not (call.scanner.is_in_string or close[0] in "}]"):
                return None, len(text) if call.first is None else call.first.end()
            call.searched += close.start() == close.end()

    def _end_of(self, call: _Call, form: CallText, is_last: bool) -> tuple[Calls | None, int] | None:
        """Return a call's end if it is certain (see `_Call.end`)."""
        text, begin = self._text, call.mark.end()

        def read(end: int) -> Calls | None:
            return form.read(call.mark, text[begin:end])

        while True:
            close, call.searched = self._find(form.field, call.searched, is_last)
            if close is None:
                break
            call.searched += close.start() == close.end()
            call.first = call.first or close
            if not form.may_begin(text, begin, close.start()):
                # Only a call without arguments may have ended before.
                return (None, call.first.end()) if call.last is None else (read(call.last.start()), call.last.end())
            if call.last is not None and call.following is None and not call.is_torn:
                call.following = form.opening(text, call.last.end(), close)
            if call.following is not None:
                if form.may_end(text, call.following.end(), close.start()):
                    calls = read(call.last.start())
                    if calls or not read(close.start()):
                        return calls, call.last.end()
                    call.last, call.following = close, None
            elif form.may_end(text, begin, close.start()):
                call.last, call.is_torn = close, False
            else:
                call.is_torn = True
        if not is_last:
            return None
        if call.last is not None and not call.is_torn:
            return read(call.last.start()), call.last.end()
        is_whole = call.last is None and form.field.content == "json"  # what ends the answer may be the closing mark
        return (read(len(text)) if is_whole else None), len(text)

    # ------------------------------------------------------------------------------------- blocks

    def _tell(self, end: int) -> None:
        """Report the present field's text up to a position."""
        text, self._position = self._text[max(self._position, self._num_begun) : end], end
        if self._field is not None:
            self._show(self._field, text)

    def _show(self, field: Any, text: str) -> None:
        """Report text of a field, all but the white space at its end; None: of a call that is none."""
        edge = self._edge
        if edge.drops_space:
            text = text.lstrip()
        whole = edge.held + text
        shown = whole.rstrip()
        edge.held = whole[len(shown) :]
        if not shown:
            return
        if edge.is_new and field is not None and field is edge.field and field.join:
            shown = field.join + shown
        edge.drops_space, edge.is_new, edge.field = False, False, field
        is_reasoning = field is not None and field.name in self._reasoning
        self._add(ReasoningBlock if is_reasoning else TextBlock, shown)

    def _end_calls(self, calls: Calls | None, end: int) -> None:
        begin, self._position = max(self._position, self._num_begun), end
        if calls is None:
            self._show(None, self._text[begin:end])
        elif end > self._num_begun:  # else the prompt has them
            for name, arguments in calls:
                self._begin_call(name)
                self._give_arguments(arguments)
        self._edge.is_new = True

    def _begin_call(self, name: str) -> None:
        self._edge.held, self._edge.field = "", None
        self._is_dropped = self.num_calls > 0 and not self._is_parallel
        if not self._is_dropped:
            call = CallBlock(self._new_call_id(name, self.num_calls), name)
            self.blocks.append(call)
            self._grown.append(BlockDelta(len(self.blocks) - 1, call, "", is_new=True))

    def _give_arguments(self, text: str) -> None:
        if text and not self._is_dropped:
            call = self.blocks[-1]
            assert isinstance(call, CallBlock)
            call.arguments += text
            self._grown.append(BlockDelta(len(self.blocks) - 1, call, text, is_new=False))
