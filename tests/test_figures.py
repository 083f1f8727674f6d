"""The figures in the documentation: those that need no clock are drawn, and show what the text says about them."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from tools.make_figures import FIGURES, FOLDER

WITHOUT_TIMES = ("routing", "merging", "draft_tokens")
DETERMINISTIC = ("static-waves", "merging", "padding", "ladder", "mask", "paging", "preemption", "routing")
TEXT = "".join((FOLDER.parent / name).read_text(encoding="utf-8") for name in ("how-it-works.md", "replicas.md"))
STORED: dict[str, Any] = {name: json.loads((FOLDER / f"{name}.json").read_text()) for name in FIGURES}


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of each figure after it was drawn."""
    folder = tmp_path_factory.mktemp("figures")
    for name in DETERMINISTIC:
        FIGURES[name]().save(folder, name)
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in DETERMINISTIC}


@pytest.mark.thorough
def test_the_ladder_saves_steps_and_fills_slots(numbers: dict[str, Any]) -> None:
    ladder = numbers["ladder"]
    assert ladder["static"]["num_steps"] > 1.5 * ladder["engine"]["num_steps"]
    assert ladder["padded"]["num_steps"] >= ladder["ragged"]["num_steps"] == ladder["engine"]["num_steps"]
    assert ladder["static"]["occupancy"] < 0.6 < ladder["engine"]["occupancy"]
    assert set(ladder["requests with other tokens than static"].values()) == {0}
    padding = numbers["padding"]["share of padding"]
    assert padding["static"]["keys"] > padding["padded"]["keys"] > padding["ragged"]["keys"] == 0


@pytest.mark.thorough
def test_a_mixed_step_has_all_three_kinds_of_spans(numbers: dict[str, Any]) -> None:
    assert [kind for _, kind, _, _ in numbers["mask"]["spans"]] == ["decode", "prefill", "chunk"]
    assert numbers["mask"]["difference from the definition"] < 1e-5


@pytest.mark.thorough
def test_paging_takes_little_more_than_the_tokens_need(numbers: dict[str, Any]) -> None:
    most = numbers["paging"]["most places"]
    assert most["tokens"] <= most["in blocks"] < most["reserved"]
    assert numbers["paging"]["tokens over blocks"] > 0.8 > numbers["paging"]["tokens over reserved"]


@pytest.mark.thorough
def test_a_small_cache_costs_steps_and_tokens(numbers: dict[str, Any]) -> None:
    preemption = numbers["preemption"]
    assert preemption["preemptions"] > 0
    assert preemption["blocks"]["most used of the ample"] > preemption["blocks"]["small"]
    assert preemption["tokens computed"]["small"] > preemption["tokens computed"]["ample"]


@pytest.mark.thorough
def test_routing_by_prefix_brings_the_first_token_in_half_the_time(numbers: dict[str, Any]) -> None:
    def medians(routing: str) -> list[int]:
        return [each["time to first token, median ms"] for each in numbers["routing"][routing]]

    for other in ("least-loaded", "round-robin"):
        assert all(2 * mine < theirs for mine, theirs in zip(medians("prefix"), medians(other), strict=True))


@pytest.mark.thorough
def test_the_stored_numbers_are_those_of_the_code(numbers: dict[str, Any]) -> None:
    for name in ("static-waves", "merging", "padding", "ladder", "preemption", "routing"):
        assert {**STORED[name], "machine": None} == {**numbers[name], "machine": None}


def test_accepted_draft_tokens_save_their_steps() -> None:
    drafting = STORED["draft_tokens"]
    assert drafting["steps"] + drafting["right"] == drafting["tokens"]
    assert drafting["right"] < drafting["proposed"]
    assert 2 < drafting["tokens"] / drafting["steps"] < 4, "the text says a third"


def test_the_stored_figures_were_drawn_on_one_machine_with_kernels() -> None:
    machines = {json.dumps(figure["machine"]) for name, figure in STORED.items() if name not in WITHOUT_TIMES}
    assert len(machines) == 1
    assert STORED["ladder"]["machine"]["CPU kernels"]


def sentences() -> list[str]:
    """What the text says of the stored numbers, in its own words."""
    step, waves, padding, ladder = (STORED[name] for name in ("decode-step", "static-waves", "padding", "ladder"))
    paging, chunks, preemption = (STORED[name] for name in ("paging", "chunked-prefill", "preemption"))
    prefix, latency = STORED["prefix-sharing"], STORED["latency"]
    reading, multiplying = (
        step[f"milliseconds to {work}"] for work in ("read all weights", "multiply one vector by all weights")
    )
    engine, plain = step["milliseconds a step"]["engine"], step["milliseconds a step"]["plain transformers"]
    rates, generated = step["tokens a second"]["engine"], sum(ladder["new tokens"])
    places, budgets = paging["most places"], chunks["by budget"]
    steps, computed = preemption["steps"], preemption["tokens computed"]
    whole, small = budgets["1024"], budgets["64"]
    seconds, counts = prefix["seconds"], prefix["prompt tokens computed"]
    return [
        f"{step['weight bytes'] / 1e6:.0f} MB at {step['bytes a second'] / 1e9:.1f} GB/s, or {reading:.1f} ms",
        f"at {step['operations a second'] / 1e9:.0f} billion operations per second, so the arithmetic takes "
        f"{multiplying:.1f} ms",
        f"about {reading / multiplying:.0f} of them ({reading} / {multiplying})",
        f"{step['cache bytes a token'] // 1024} KiB for GPT-2 and {paging['bytes a token'] // 1024} KiB for",
        f"{rates['1']:.0f} tokens per second for one sequence, {rates['8']:.0f} for eight, {rates['128']:.0f} for 128",
        f"from {engine['1']:.0f} to {engine['8']:.0f} ms with eight",
        f"120 = {waves['num_steps']} steps for {generated} tokens",
        f"only {waves['occupancy']:.0%} of the slots' steps do useful work. {waves['token_padding']:.0%} of the tokens "
        f"and {waves['key_padding']:.0%} of the keys",
        f"take {ladder['padded']['num_steps']} steps instead of {waves['num_steps']}",
        f"{padding['share of padding']['padded']['keys']:.0%} of all keys are padding",
        f"{padding['passes of padded that stop running rows']} steps of this run are such pauses",
        f"between {-(-generated // 8)} and {-(-generated // 8) + 120} steps. The run takes "
        f"{ladder['ragged']['num_steps']}",
        f"share a row of {STORED['mask']['queries']} tokens",
        f"they end after {paging['tokens a story'][0]} to {paging['tokens a story'][-1]}",
        f"takes {places['reserved']} places",
        f"{paging['tokens over reserved']:.0%} of the reserved places hold a token",
        f"{paging['tokens over blocks']:.0%} of all places in blocks are in use, and the peak is {places['in blocks']} "
        f"places instead of {places['reserved']}",
        f"{counts['static'][-1]} against {counts['engine'][-1]}",
        f"as long as {whole['longest gap ms'] / whole['usual gap ms']:.0f} decode steps "
        f"({whole['longest gap ms']:.0f} / {whole['usual gap ms']:.0f} ms)",
        *(
            f"| {budget} | {each['steps of the long prompt']} | {each['longest gap ms']} ms "
            f"| {each['first token of the long prompt s']:.2f} s |"
            for budget, each in budgets.items()
        ),
        f"{small['first token of the long prompt s'] / whole['first token of the long prompt s']:.1f} times as late",
        f"use up to {preemption['blocks']['most used of the ample']} blocks and have {preemption['blocks']['small']}",
        f"takes {steps['small cache']} steps instead of {steps['ample cache']}, and computes "
        f"{computed['small']} tokens instead of {computed['ample']}, "
        f"{computed['small'] / computed['ample'] - 1:.0%} more",
        *(
            f"| {name} | {each['num_steps']} | {each['seconds']:.2f} | {each['tokens_per_second']:.0f} "
            f"| {each['occupancy']:.0%} | {each['latency_p50']:.2f} s | {each['latency_p95']:.2f} s "
            f"| {each['first_token_p50']:.2f} s |"
            for name, each in ((name, latency[name]) for name in ("static", "padded", "ragged", "engine"))
        ),
        f"takes {engine['1']:.0f} ms for one sequence and {engine['8']:.0f} ms for eight: "
        f"{engine['8'] / engine['1']:.1f} times as long",
        f"faster for a single sequence ({plain['1']:.0f} ms)",
        f"With eight sequences `transformers` takes {plain['8']:.0f} ms",
        f"({engine['128']:.0f} and {plain['128']:.0f} ms)",
        f"static batching takes {seconds['static'][-1]:.2f} s, the lesson {seconds['shared prefix'][-1]:.2f} s "
        f"and the engine {seconds['engine'][-1]:.2f} s",
        f"({latency['engine']['seconds']:.2f} s instead of {latency['ragged']['seconds']:.2f} s)",
    ]


@pytest.mark.parametrize("sentence", sentences())
def test_the_text_quotes_the_stored_numbers(sentence: str) -> None:
    assert sentence in " ".join(TEXT.split())


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_in_the_tree_and_in_the_text(name: str) -> None:
    assert (FOLDER / f"{name}.png").is_file()
    assert (FOLDER / f"{name}.json").is_file()
    assert f"(figures/{name}.png)" in TEXT


def test_the_text_shows_only_figures_that_the_tool_draws() -> None:
    assert TEXT.count("(figures/") == len(FIGURES)
    assert {path.stem for path in Path(FOLDER).iterdir()} == set(FIGURES)


def test_the_ladder_to_play_with_shows_what_the_text_says() -> None:
    script = (FOLDER.parent / "assets" / "ladder-runs.js").read_text(encoding="utf-8")
    runs = json.loads(script.partition(" = ")[2].rstrip().removesuffix(";"))["runs"]
    assert len(runs) == 18
    for run in runs:
        steps = {name: len(method["tokens"]) for name, method in run["methods"].items()}
        assert steps["static"] >= steps["padded"] >= steps["ragged"] == steps["engine"]
        if (run["lengths"], run["arrivals"]) == ("all alike", "all at once"):
            assert len(set(steps.values())) == 1
        if run["lengths"] == "one very long" and run["slots"] > 2:
            assert steps["engine"] == 96 == max(length for _, length, _ in run["requests"])
