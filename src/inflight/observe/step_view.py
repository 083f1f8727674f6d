"""`StepView`: one step as plain data to draw: the sequences and tokens of its row, and which tokens attend to which.

Masks are those of reference attention (`ragged_mask`), computed from the batch. It chooses names (letters, kinds, white
space); it knows nothing of terminals and pictures.

`Lanes`: the slots of a short run, a letter for each step, for a terminal or a page.
"""

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from inflight.contracts.step.record import SpanKind, SpanRecord, StepRecord
from inflight.execution.attention.compared import ComparedCall
from inflight.execution.attention.reference import ragged_mask
from inflight.execution.ragged_batch import RaggedBatch

LABEL = 9
"""Columns before the first step."""

Holder = tuple[int, SpanKind]
"""A sequence's number, and its work."""


class Lanes:
    """The sequence in each slot and step: a capital letter for a prefill, a small one for a decode.

    Attributes:
        marked: the numbers of steps that are marked below the lanes.
    """

    def __init__(self) -> None:
        self.marked: Sequence[int] = ()
        self._steps: list[Mapping[int, Holder]] = []
        self._waiting: list[int] = []

    def add(self, holders: Mapping[int, Holder], num_waiting: int) -> None:
        """Add a step: each slot's work, and the number of waiting sequences."""
        self._steps.append(holders)
        self._waiting.append(num_waiting)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = max(options.max_width - LABEL, 1)
        first = max(len(self._steps) - room, 0)
        shown = range(first, len(self._steps))
        since = f" from step {first} on" if first else ""
        yield Text(f"the slots, step by step{since} (A prefill, a decode)", style="dim")
        for slot in range(1 + max((max(step, default=-1) for step in self._steps), default=-1)):
            line = _line(f"slot {slot}")
            for number in shown:
                line.append(*_mark(self._steps[number].get(slot)))
            yield line
        if any(self._waiting):
            digits = "".join(" " if count == 0 else str(count) if count < 10 else "+" for count in self._waiting)
            yield _line("waiting").append(digits[first:], style="dim")
        if self.marked:
            yield _line("shown").append("".join("^" if number in self.marked else " " for number in shown).rstrip())


def _line(name: str) -> Text:
    return Text(f"{name:{LABEL}}", style="dim", no_wrap=True, overflow="crop")


def _mark(holder: Holder | None) -> tuple[str, str]:
    if holder is None:
        return " ", ""
    number, kind = holder
    letter = sequence_label(number)[-1]
    colour = COLOURS[number % len(COLOURS)]
    return (letter.lower(), colour) if kind == "decode" else (letter, f"bold {colour}")


COLOURS = ("#2f7fe0", "#e8590c", "#2b9a45", "#ae3ec9", "#c28100", "#0c8599", "#d6336c", "#7a6bdf")
"""One colour per sequence; all are readable on white and on black."""

MAX_NUMBERS = 8
"""Most calls that a heading lists one by one."""


@dataclass(frozen=True, slots=True)
class SpanView:
    """One sequence's part of the row.

    Attributes:
        number: the sequence's number, in order of first steps; it determines letter and colour.
        kind, slot, request_id: see `SpanRecord`.
        num_cached: how many of its keys were in the cache before the step.
        keys: the texts of all tokens up to the step's last one, including those of the step.
        predecessor: the number of the sequence that had the slot before, if this is the sequence's first step there.
        num_draft_tokens, num_accepted: how many of its last tokens were drafts, and how many were accepted.
    """

    number: int
    kind: SpanKind
    slot: int
    request_id: str
    num_cached: int
    keys: tuple[str, ...]
    predecessor: int | None = None
    num_draft_tokens: int = 0
    num_accepted: int = 0

    @property
    def letter(self) -> str:
        """The sequence's name."""
        return sequence_label(self.number)

    @property
    def colour(self) -> str:
        """The sequence's colour, as `#rrggbb`."""
        return COLOURS[self.number % len(COLOURS)]

    @property
    def tokens(self) -> tuple[str, ...]:
        """The texts of the tokens that the step computed."""
        return self.keys[self.num_cached :]

    @property
    def label(self) -> str:
        """The kind and the number of tokens; a prefill, which ends in a first token, is in capitals. Draft tokens are
        shown as a plus, with the number accepted."""
        drafts = f"+{self.num_accepted}/{self.num_draft_tokens}" if self.num_draft_tokens else ""
        return (
            f"{'PREFILL' if self.kind == 'prefill' else self.kind}({len(self.tokens) - self.num_draft_tokens}{drafts})"
        )


@dataclass(frozen=True, slots=True)
class MaskView:
    """The mask of all attention calls of one kind.

    Attributes:
        heading: names the calls.
        allowed: `[T, sum of all spans' keys]` bool, from `ragged_mask`.
    """

    heading: str
    allowed: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StepView:
    """One step.

    Attributes:
        step: the step's number, from 0.
        num_waiting: sequences without a slot.
        spans: in the order of the row.
        masks: one for each kind of attention call.
        backend: the attention backend that ran.
        num_calls: attention calls in the step.
        difference: the largest difference between the backend and the reference in any call, relative to the largest
            magnitude of the reference's output.
    """

    step: int
    num_waiting: int
    spans: tuple[SpanView, ...]
    masks: tuple[MaskView, ...]
    backend: str
    num_calls: int
    difference: float

    @property
    def total_q(self) -> int:
        """Tokens that the step computed: the length of the row."""
        return sum(len(span.tokens) for span in self.spans)

    @property
    def total_kv(self) -> int:
        """Tokens of its sequences that were in the cache before."""
        return sum(span.num_cached for span in self.spans)

    @property
    def sizes(self) -> str:
        """The step's sizes in words."""
        keys = self.total_q + self.total_kv
        return f"total_q {self.total_q} fed, total_kv {self.total_kv} cached: {self.total_q} queries over {keys} keys"

    @property
    def mixes_kinds(self) -> bool:
        """Whether a prefill, or a chunk of one, shares the row with decodes of other sequences."""
        return len({span.kind == "decode" for span in self.spans}) == 2

    @property
    def is_handover(self) -> bool:
        """Whether a sequence begins in a slot that another one has left, beside decodes of others."""
        return self.mixes_kinds and any(span.predecessor is not None for span in self.spans)

    @property
    def handovers(self) -> str:
        """A sentence for each sequence that begins in a slot which another one has left."""
        decoding = [span.letter for span in self.spans if span.kind == "decode"]
        decodes = f"the decode{'s' if len(decoding) > 1 else ''} of {_listed(decoding)}"
        beside = f", and its tokens share this row with {decodes}" if decoding else ""
        return "\n".join(
            f"{span.letter} takes slot {span.slot}, which {sequence_label(span.predecessor)} has left{beside}"
            for span in self.spans
            if span.predecessor is not None
        )

    @property
    def agreement(self) -> str:
        """A sentence that compares the backend with the reference."""
        return (
            f"re-attended through reference: {self.backend} differs by at most {self.difference:.1e} of the largest "
            f"output, over {self.num_calls} attention calls"
        )


def view_span(
    number: int,
    record: SpanRecord,
    key_token_ids: Sequence[int | None],
    token_text: Callable[[int], str],
    predecessor: int | None = None,
) -> SpanView:
    """Return a span to draw; `key_token_ids` are its sequence's tokens up to the span's end, None where unknown."""
    keys = tuple("…" if token_id is None else visible(token_text(token_id)) for token_id in key_token_ids)
    return SpanView(
        number,
        record.kind,
        record.slot,
        record.request_id,
        record.start,
        keys,
        predecessor,
        record.num_draft_tokens,
        record.num_accepted,
    )


def view_step(
    record: StepRecord, spans: Sequence[SpanView], batch: RaggedBatch, calls: Sequence[ComparedCall], backend: str
) -> StepView:
    """Assemble a step from its record, its spans, the batch that ran, and its compared attention calls."""
    return StepView(
        step=record.step,
        num_waiting=record.num_waiting,
        spans=tuple(spans),
        masks=view_masks(batch, calls),
        backend=backend,
        num_calls=len(calls),
        difference=max((call.difference for call in calls), default=0.0),
    )


def view_masks(batch: RaggedBatch, calls: Sequence[ComparedCall]) -> tuple[MaskView, ...]:
    """Return one mask for each window and chunk among the calls, in the order of their first calls."""
    kinds: dict[tuple[int | None, int | None], list[int]] = {}
    for number, call in enumerate(calls):
        kinds.setdefault((call.spec.window, call.spec.chunk), []).append(number)
    return tuple(
        MaskView(_heading(numbers, len(calls), window, chunk), ragged_mask(batch, window, chunk).numpy())
        for (window, chunk), numbers in kinds.items()
    )


def _heading(numbers: Sequence[int], num_calls: int, window: int | None, chunk: int | None) -> str:
    if len(numbers) == num_calls:
        who = f"all {num_calls} attention calls"
    else:
        who = f"{'call' if len(numbers) == 1 else 'calls'} {', '.join(map(str, numbers[:MAX_NUMBERS]))}"
        who += f", … ({len(numbers)} of {num_calls})" if len(numbers) > MAX_NUMBERS else ""
    what = [f"window {window}"] if window is not None else []
    what += [f"chunks of {chunk}"] if chunk is not None else []
    return f"{who}: {', '.join(what) or 'the whole past'}"


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), *words[-1:]] if len(words) > 1 else words)


def sequence_label(number: int) -> str:
    """Return the name of sequence `number`: A to Z, then AA, AB, …, like spreadsheet columns."""
    rest, last = divmod(number, 26)
    return (sequence_label(rest - 1) if rest else "") + chr(ord("A") + last)


_SIGNS = {" ": "·", "\n": "↵", "\t": "⇥"}


def visible(text: str) -> str:
    """Return a token's text on one line: spaces, line ends and tabs become signs, invisible characters are escaped."""
    return "".join(_SIGNS.get(char) or (_escaped(char) if _has_no_shape(char) else char) for char in text)


def _has_no_shape(char: str) -> bool:
    return unicodedata.category(char)[0] in "CZ"  # control, format, unassigned; spaces of all kinds


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()
