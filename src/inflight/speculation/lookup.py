"""`Lookup`: drafts what followed the same tokens before: in the sequence, in its caller's prediction, or in recent
outputs.

Takes the longest suffix of a sequence that occurred earlier, and drafts what followed it (prompt lookup, Saxena, 2023;
over other requests' outputs as in SuffixDecoding, Oliaro et al., 2024). It learns acceptance rates by the length of the
suffix, from every new token, whether or not its draft tokens were verified.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from inflight.scheduling.draft_tokens import Candidate
from inflight.speculation.drafter import NO_DRAFT, DraftTokens
from inflight.speculation.suffix_automaton import Cursor, SuffixAutomaton

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""The shortest suffix of each class with about equal acceptance rates."""
MEMORY = 0.97
"""The decay of earlier outcomes of a class at each new one."""
SEQUENCE_MEMORY = 0.9
PRIOR_WEIGHT = 3.0
"""The weight of all sequences' outcomes, in outcomes of the sequence's own."""
LONGEST_TRIED = 32
"""The maximum number of draft tokens that are compared with the actual tokens."""
LEAST_CHANCE = 0.02
"""A draft ends where it is less likely than this that all of it is right."""
MAX_RECENT_TOKENS = 1 << 16
"""Tokens of recent outputs kept for each salt: at least this many, at most twice as many."""
MAX_SALTS = 16
BEGINNING, END = -2, -3
"""Markers around a prediction. The output starts with the first one, too, so that the prediction's start is found."""


class SuffixOutcomes:
    """Acceptance rates of draft tokens by the length of the matched suffix; old outcomes fade."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self.num_right = [0.0] * len(LENGTHS)
        self.num_tried = [0.0] * len(LENGTHS)

    def observe(self, length: int, is_right: bool) -> None:
        """A draft token after a suffix of this length was right, or not."""
        kind = _kind(length)
        self.num_right[kind] = self.num_right[kind] * self._memory + is_right
        self.num_tried[kind] = self.num_tried[kind] * self._memory + 1.0


@dataclass(slots=True)
class TrackedSequence:
    """A sequence's state.

    Attributes:
        prediction: its place in the caller's prediction.
        cursors: its places in recent outputs.
        proposed: the last draft tokens, after its first `num_tokens` tokens and a suffix of length `length`.
    """

    automaton: SuffixAutomaton
    cache_salt: str | None
    num_prompt_tokens: int
    record: SuffixOutcomes
    prediction: Cursor | None = None
    cursors: list[Cursor] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)
    length: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of its tokens read so far."""
        return len(self.automaton.token_ids)


class RecentOutputs:
    """The latest outputs of one salt, concatenated in two automata: the younger grows, and replaces the older when
    full."""

    def __init__(self) -> None:
        self.automata: list[SuffixAutomaton] = []
        self._num_outputs = 0

    def add(self, token_ids: "memoryview | list[int]") -> None:
        """Add an output."""
        if not self.automata or len(self.automata[0].token_ids) >= MAX_RECENT_TOKENS:
            self.automata = [SuffixAutomaton(), *self.automata[:1]]
        young = self.automata[0]
        for token_id in token_ids:
            young.append(token_id)
        self._num_outputs += 1
        young.append(-1 - self._num_outputs)  # no other output has this token, so nothing matches across it


class Lookup:
    """Proposes by lookup; see `Drafter`."""

    def __init__(self) -> None:
        self._followed: dict[int, TrackedSequence] = {}
        self._recent: dict[str | None, RecentOutputs] = {}
        self._record = SuffixOutcomes(MEMORY)

    def propose(self, candidate: Candidate) -> DraftTokens:
        """Propose what followed the longest known suffix."""
        followed = self._followed.get(candidate.sequence_id)
        if followed is None:
            followed = self._follow(candidate)
        self._catch_up(followed, candidate)
        automaton, (length, end) = followed.automaton, followed.automaton.last_occurrence()
        predictions = [] if followed.prediction is None else [followed.prediction]
        for cursor in predictions + followed.cursors:
            other_length, other_end = cursor.last_occurrence()
            if other_length > length:
                automaton, length, end = cursor.automaton, other_length, other_end
        followed.length = length
        if length == 0:
            followed.proposed = []
            return NO_DRAFT
        followed.proposed = _continuation(automaton, end, candidate.max_draft_tokens)
        chances = self._chances(followed, length)
        return DraftTokens(followed.proposed[: len(chances)], chances)

    def keep_only(self, is_unfinished: Callable[[int], bool]) -> None:
        """Drop finished sequences, keeping their outputs for others."""
        for sequence_id in [each for each in self._followed if not is_unfinished(each)]:
            ended = self._followed.pop(sequence_id)
            recent = self._recent.pop(ended.cache_salt, None) or RecentOutputs()
            recent.add(memoryview(ended.automaton.token_ids)[ended.num_prompt_tokens :])
            self._recent[ended.cache_salt] = recent  # the last of the salts
            if len(self._recent) > MAX_SALTS:
                del self._recent[next(iter(self._recent))]

    def _follow(self, candidate: Candidate) -> TrackedSequence:
        followed = TrackedSequence(
            SuffixAutomaton(),
            candidate.cache_salt,
            candidate.num_prompt_tokens,
            SuffixOutcomes(SEQUENCE_MEMORY),
            _beginning_of(candidate.predicted_ids) if candidate.predicted_ids else None,
        )
        self._followed[candidate.sequence_id] = followed
        return followed

    def _catch_up(self, followed: TrackedSequence, candidate: Candidate) -> None:
        """Read new tokens, and compare the last draft tokens with them."""
        num_seen = followed.num_tokens
        new = candidate.token_ids[num_seen:]
        for place, (proposed, token_id) in enumerate(zip(followed.proposed, new, strict=False)):
            for record in (self._record, followed.record):
                record.observe(followed.length + place, proposed == token_id)
            if proposed != token_id or place == LONGEST_TRIED:
                break
        recent = self._recent.get(candidate.cache_salt)
        automata = [] if recent is None else recent.automata
        if [cursor.automaton for cursor in followed.cursors] != automata:
            followed.cursors = [Cursor(automaton) for automaton in automata]
            new_for_cursors = candidate.token_ids[-LENGTHS[-1] :]
        else:
            new_for_cursors = new
        for token_id in new:
            followed.automaton.append(token_id)
        if followed.prediction is not None:
            for token_id in candidate.token_ids[max(num_seen, candidate.num_prompt_tokens) :]:
                followed.prediction.advance(token_id)
        for cursor in followed.cursors:
            for token_id in new_for_cursors:
                cursor.advance(token_id)

    def _chances(self, followed: TrackedSequence, length: int) -> list[float]:
        """The chances of draft tokens after a suffix of this length, down to `LEAST_CHANCE`."""
        chances: list[float] = []
        every, own, all_right = self._record, followed.record, 1.0
        kind, first = _kind(length), length
        while len(chances) < len(followed.proposed) and all_right >= LEAST_CHANCE:
            prior = (every.num_right[kind] + 0.5) / (every.num_tried[kind] + 1.0)
            chance = (own.num_right[kind] + PRIOR_WEIGHT * prior) / (own.num_tried[kind] + PRIOR_WEIGHT)
            end = LENGTHS[kind + 1] if kind + 1 < len(LENGTHS) else first + len(followed.proposed)
            for _ in range(min(end - first, len(followed.proposed) - len(chances))):
                chances.append(chance)
                all_right *= chance
                if all_right < LEAST_CHANCE:
                    break
            kind, first = kind + 1, end
        return chances


def _beginning_of(token_ids: Sequence[int]) -> Cursor:
    """A place before the first of these tokens."""
    automaton = SuffixAutomaton()
    for token_id in (BEGINNING, *token_ids, END):
        automaton.append(token_id)
    cursor = Cursor(automaton)
    cursor.advance(BEGINNING)
    return cursor


def _kind(length: int) -> int:
    return bisect_right(LENGTHS, length) - 1


def _continuation(automaton: SuffixAutomaton, end: int, max_tokens: int) -> list[int]:
    """At most `max_tokens` tokens from position `end`, up to the end of an output; at the end of the text they
    repeat."""
    token_ids = automaton.token_ids[end : end + max_tokens].tolist()
    for place, token_id in enumerate(token_ids):
        if token_id < 0:
            return token_ids[:place]
    period = len(token_ids)
    while period and len(token_ids) < max_tokens:
        token_ids += token_ids[: max_tokens - len(token_ids)]
    return token_ids
