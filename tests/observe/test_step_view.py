"""A step as data: the sequence and role of each token in the row, and which token may see which."""

import numpy as np
import pytest

from inflight.observe.step_view import StepView, sequence_label, visible
from tests import zoo
from tests.observe.steps import MIXED, captured


def expected_mask(view: StepView, window: int | None = None) -> list[list[bool]]:
    """The mask cell by cell by definition: the same sequence, not later, within the window."""
    keys = [(number, at) for number, span in enumerate(view.spans) for at in range(len(span.keys))]
    queries = [(n, at) for n, at in keys if at >= view.spans[n].num_cached]
    return [[q == k and j <= i and (window is None or i - j < window) for k, j in keys] for q, i in queries]


def test_a_step_that_mixes_all_kinds() -> None:
    view = captured()
    assert [(span.letter, span.label) for span in view.spans] == [
        ("A", "decode(1)"),
        ("B", "PREFILL(2)"),
        ("C", "chunk(7)"),
    ]
    assert [span.num_cached for span in view.spans] == [3, 7, 0]
    assert (view.step, view.total_q, view.total_kv, view.num_waiting) == (1, 10, 10, 0)
    assert view.sizes == "total_q 10 fed, total_kv 10 cached: 10 queries over 20 keys"
    first_token = zoo.plain_greedy(zoo.build("llama"), MIXED[0], 1)
    assert view.spans[0].keys == tuple(map(str, MIXED[0] + first_token))
    assert view.spans[1].tokens == ("17", "18")
    assert view.spans[2].tokens == tuple(map(str, range(20, 27)))
    assert [mask.heading for mask in view.masks] == ["all 3 attention calls: the whole past"]
    assert view.masks[0].allowed.tolist() == expected_mask(view)
    assert (view.backend, view.num_calls) == ("cpu", 3)
    assert 0 < view.difference < 1e-5
    assert "cpu differs by at most" in view.agreement


def test_a_sequence_keeps_its_letter_when_others_leave() -> None:
    prompts = ([1, 2], [3, 4, 5], [6, 7])
    first, second = (captured(prompts, step, max_num_batched_tokens=3, max_num_seqs=2) for step in (0, 4))
    assert [span.letter for span in first.spans] == ["A", "B"]
    assert first.num_waiting == 1
    assert {span.letter: span.request_id for span in second.spans}.items() <= {"A": "0", "B": "1", "C": "2"}.items()


@pytest.mark.parametrize(
    ("name", "headings", "windows"),
    [
        ("gemma3", ["calls 0, 2: window 12", "call 1: the whole past"], [zoo.WINDOW, None]),
        ("mistral", ["all 3 attention calls: window 12"], [zoo.WINDOW]),
    ],
)
def test_each_kind_of_attention_call_has_its_mask(name: str, headings: list[str], windows: list[int | None]) -> None:
    view = captured(step=3, name=name)
    assert max(len(span.keys) for span in view.spans) > zoo.WINDOW
    assert [mask.heading for mask in view.masks] == headings
    for mask, window in zip(view.masks, windows, strict=True):
        assert np.array_equal(mask.allowed, expected_mask(view, window))


def test_sequences_are_lettered_like_spreadsheet_columns() -> None:
    assert [sequence_label(n) for n in (0, 25, 26, 51, 52, 701, 702)] == ["A", "Z", "AA", "AZ", "BA", "ZZ", "AAA"]


def test_any_token_is_written_on_one_line() -> None:
    assert visible(" time") == "·time"
    assert visible("\n\t\r") == "↵⇥\\r"
    assert visible("\x1b[31m") == "\\x1b[31m"
    assert visible("a\u202eb\u200b\u00a0") == "a\\u202eb\\u200b\\xa0"
    assert visible("字 é[b]") == "字·é[b]"


def test_tokens_that_have_left_all_windows_are_still_shown() -> None:
    (prompt,) = prompts = [list(range(1, 60))]
    view = captured(prompts, step=7, name="mistral", block_size=4)
    assert [int(key) for key in view.spans[0].keys[:59]] == prompt
    assert view.difference < 1e-5


@pytest.mark.parametrize("name", ["gemma3", "gemma4_large", "gemma4_few_global"])
@pytest.mark.thorough("gemma3")
def test_forks_are_followed_if_calls_have_parts_of_blocks(name: str) -> None:
    (prompt,) = prompts = [list(range(1, 31))]
    view = captured(prompts, step=9, name=name, n=3, block_size=4, max_num_batched_tokens=8)
    assert len(view.spans) == 3
    for span in view.spans:
        assert [int(key) for key in span.keys[:30]] == prompt
    assert view.difference < 1e-5
