"""The draft tokens that `Lookup` finds, and their estimated acceptance rates."""

import random

from inflight.scheduling.draft_tokens import Candidate
from inflight.speculation import Lookup
from inflight.speculation.lookup import MAX_SALTS


def look(lookup: Lookup, token_ids: list[int], sequence_id: int = 0, most: int = 8, **others: object) -> list[int]:
    candidate = Candidate(sequence_id, token_ids, 4, most, **others)  # type: ignore[arg-type]
    return list(lookup.propose(candidate).token_ids)


def test_what_followed_before_is_drafted() -> None:
    assert look(Lookup(), [1, 2, 3, 4, 5, 6, 9, 2, 3], most=5) == [4, 5, 6, 9, 2]
    assert look(Lookup(), [1, 2, 3, 4, 5, 6, 9, 2, 3], most=2) == [4, 5]


def test_a_new_token_says_nothing() -> None:
    assert look(Lookup(), [1, 2, 3, 4]) == []


def test_a_repetition_goes_on_beyond_the_end() -> None:
    assert look(Lookup(), [5, 1, 2, 1, 2, 1, 2], most=5) == [1, 2, 1, 2, 1]


def test_recent_outputs_of_others_are_found_but_not_their_prompts() -> None:
    lookup = Lookup()
    look(lookup, [1, 2, 3, 4, 50, 51, 52, 53])  # four tokens of prompt
    lookup.keep_only(lambda sequence_id: False)
    assert look(lookup, [8, 8, 50, 51], sequence_id=1) == [52, 53]
    assert look(lookup, [8, 9, 1, 2], sequence_id=2) == []


def test_a_prediction_is_drafted_from_the_first_token_on() -> None:
    lookup, predicted = Lookup(), [60, 61, 62, 63, 64, 65, 66]
    assert look(lookup, [1, 2, 3, 4], predicted_ids=predicted, most=4) == predicted[:4]
    assert look(lookup, [1, 2, 3, 4, 60, 61, 70], predicted_ids=predicted) == []
    assert look(lookup, [1, 2, 3, 4, 60, 61, 70, 64], predicted_ids=predicted) == [65, 66]
    assert look(lookup, [1, 2, 3, 4], sequence_id=1, predicted_ids=[], most=4) == []


def test_the_prompt_is_not_taken_for_the_beginning_of_what_is_predicted() -> None:
    assert look(Lookup(), [1, 60, 61, 62], predicted_ids=[60, 61, 62, 63], most=4) == [60, 61, 62, 63]


def test_nothing_is_found_across_the_end_of_an_output() -> None:
    lookup = Lookup()
    for sequence_id in (0, 1):
        look(lookup, [1, 2, 3, 4, 60 + sequence_id, 70 + sequence_id], sequence_id)
        lookup.keep_only(lambda sequence_id: False)
    assert look(lookup, [9, 9, 60], sequence_id=2) == [70]


def test_outputs_of_another_salt_are_never_found() -> None:
    lookup = Lookup()
    look(lookup, [1, 2, 3, 4, 50, 51, 52, 53], cache_salt="a")
    lookup.keep_only(lambda sequence_id: False)
    assert look(lookup, [8, 8, 50, 51], sequence_id=1, cache_salt="b") == []
    assert look(lookup, [8, 8, 50, 51], sequence_id=2) == []
    assert look(lookup, [8, 8, 50, 51], sequence_id=3, cache_salt="a") == [52, 53]


def test_the_salt_that_was_not_used_for_longest_is_forgotten() -> None:
    lookup = Lookup()
    for number in range(2 * MAX_SALTS):
        for sequence_id, salt in enumerate(("kept", f"salt {number}")):
            look(lookup, [1, 2, 3, 4, 50, 51, 52, 53], sequence_id, cache_salt=salt)
        lookup.keep_only(lambda sequence_id: False)
    assert look(lookup, [8, 8, 50, 51], 0, cache_salt="kept") == [52, 53]
    assert look(lookup, [8, 8, 50, 51], 1, cache_salt="salt 1") == []


def chances_after(texts: list[list[int]]) -> float:
    """How likely a sequence's last draft token was taken to be right, after it was followed token by token."""
    lookup = Lookup()
    chances = [0.0]
    for sequence_id, text in enumerate(texts):
        for end in range(4, len(text) + 1):
            chances = [*lookup.propose(Candidate(sequence_id, text[:end], 4, 4)).chances, *chances][:1]
    return chances[0]


def test_draft_tokens_that_come_true_are_trusted_and_others_are_not() -> None:
    rng = random.Random(1)
    assert chances_after([[1, 2, 3, 4, 5, 6, 7] * 20]) > 0.9
    assert chances_after([[rng.randrange(3) for _ in range(300)]]) < 0.6


def test_old_outputs_make_way_for_new_ones() -> None:
    lookup = Lookup()
    rng = random.Random(1)
    first = [9, 9, 9, 9, *(rng.randrange(100, 10_000) for _ in range(100))]
    look(lookup, first)
    lookup.keep_only(lambda sequence_id: False)
    assert look(lookup, [8, *first[4:20]], sequence_id=-1, most=4) == first[20:24]
    for sequence_id in range(1, 80):
        look(lookup, [9, 9, 9, 9, *(rng.randrange(10_000, 100_000) for _ in range(2000))], sequence_id)
        lookup.keep_only(lambda each: False)
    assert look(lookup, [8, *first[4:20]], sequence_id=-2) == []
    assert sum(len(each.token_ids) for each in lookup._recent[None].automata) <= 3 * 65_536
