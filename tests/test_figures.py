"""The figures in the documentation: those that need no clock are drawn, and show what the text says about them."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from tools.make_figures import FIGURES, FOLDER

DETERMINISTIC = ("static-waves", "padding", "ladder", "mask", "paging", "preemption")
TEXT = (FOLDER.parent / "how-it-works.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of each figure after it was drawn."""
    folder = tmp_path_factory.mktemp("figures")
    for name in DETERMINISTIC:
        FIGURES[name]().save(folder, name)
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in DETERMINISTIC}


def test_the_ladder_saves_steps_and_fills_slots(numbers: dict[str, Any]) -> None:
    ladder = numbers["ladder"]
    assert ladder["static"]["num_steps"] > 1.5 * ladder["engine"]["num_steps"]
    assert ladder["padded"]["num_steps"] >= ladder["ragged"]["num_steps"] == ladder["engine"]["num_steps"]
    assert ladder["static"]["occupancy"] < 0.6 < ladder["engine"]["occupancy"]
    assert set(ladder["requests with other tokens than static"].values()) == {0}
    padding = numbers["padding"]["share of padding"]
    assert padding["static"]["keys"] > padding["padded"]["keys"] > padding["ragged"]["keys"] == 0


def test_a_mixed_step_has_all_three_kinds_of_spans(numbers: dict[str, Any]) -> None:
    assert [kind for _, kind, _, _ in numbers["mask"]["spans"]] == ["decode", "prefill", "chunk"]
    assert numbers["mask"]["difference from the definition"] < 1e-5


def test_paging_takes_little_more_than_the_tokens_need(numbers: dict[str, Any]) -> None:
    most = numbers["paging"]["most places"]
    assert most["tokens"] <= most["in blocks"] < most["reserved"]
    assert numbers["paging"]["tokens over blocks"] > 0.8 > numbers["paging"]["tokens over reserved"]


def test_a_small_cache_costs_steps_and_tokens(numbers: dict[str, Any]) -> None:
    preemption = numbers["preemption"]
    assert preemption["preemptions"] > 0
    assert preemption["blocks"]["most used of the ample"] > preemption["blocks"]["small"]
    assert preemption["tokens computed"]["small"] > preemption["tokens computed"]["ample"]


def test_the_stored_numbers_match_the_code(numbers: dict[str, Any]) -> None:
    stored = {name: json.loads((FOLDER / f"{name}.json").read_text()) for name in DETERMINISTIC}
    for name in ("preemption", "padding"):
        assert {**stored[name], "machine": None} == {**numbers[name], "machine": None}
    for rung in ("static", "padded", "ragged", "engine"):
        assert stored["ladder"][rung]["num_steps"] == numbers["ladder"][rung]["num_steps"]


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_in_the_tree_and_in_the_text(name: str) -> None:
    assert (FOLDER / f"{name}.png").is_file()
    assert (FOLDER / f"{name}.json").is_file()
    assert f"(figures/{name}.png)" in TEXT


def test_the_text_shows_only_figures_that_the_tool_draws() -> None:
    assert TEXT.count("(figures/") == len(FIGURES)
    assert {path.stem for path in Path(FOLDER).iterdir()} == set(FIGURES)
