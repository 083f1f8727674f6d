"""The scripts in `examples/` run as their first lines say, and print what they are there to show."""

import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from inflight import AsyncLLM
from tests.server.serving import RunningServer

EXAMPLES = Path(__file__).parents[2] / "examples"
Printed: TypeAlias = Callable[..., str]


@pytest.fixture
def printed_by(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    """Runs a script as `python` would, but in this process, because another one takes seconds to import torch."""

    def run(name: str, *arguments: str) -> str:
        script = EXAMPLES / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        capsys.readouterr()
        runpy.run_path(str(script), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of the embedded model."""
    with RunningServer(AsyncLLM(in_process=True), model_name="inflight-demo") as server:
        yield server.url


def test_offline_batch(printed_by: Printed) -> None:
    *texts, last = printed_by("offline_batch").splitlines()
    ends = [re.match(r"\[(\w+), (\d+) tokens\] (\w+ \w+)", text) for text in texts]
    found = [(end[1], int(end[2]), end[3]) for end in ends if end is not None]
    assert [prompt for *_, prompt in found] == ["Once upon", "In a", "One morning", "Long ago", "Long ago"]
    assert found[0][:2] == ("stop", 55)
    assert found[1][:2] == ("length", 20)
    total, steps = map(int, re.findall(r"^(\d+) tokens .* (\d+) steps", last)[0])
    assert total == sum(number for _, number, _ in found)
    assert steps < total / 2  # sequences share steps


def test_chat_client(printed_by: Printed, url: str) -> None:
    lines = printed_by("chat_client", url).splitlines()
    assert lines[0] == "> Tell me a story about a fox."
    assert " fox " in lines[1]
    (first, _), (second, _) = (
        map(int, match) for line in lines for match in re.findall(r"\((\d+) prompt tokens, (\d+) generated\)", line)
    )
    assert second > first + 50  # the first answer is a part of the second prompt


def test_structured_extraction(printed_by: Printed, url: str) -> None:
    answers = [json.loads(line) for line in printed_by("structured_extraction", url).splitlines() if "{" in line]
    assert len(answers) == 3
    for answer in answers:
        assert set(answer) == {"kind", "product", "urgency"}
        assert answer["kind"] in ("complaint", "praise", "question")
        assert 1 <= answer["urgency"] <= 5


@pytest.mark.parametrize("choice", ["demanded", "auto"])
def test_agent(choice: str, printed_by: Printed, url: str) -> None:
    lines = printed_by("agent", url, *([choice] if choice == "auto" else [])).splitlines()
    if choice == "demanded":
        assert re.fullmatch(r'list_cities\(\{\s*\}\) = \["Paris", "Oslo", "Rome"\]', lines[0])
        assert re.fullmatch(r'temperature\(\{\s*"city":\s*"(\w+)"\s*\}\) = \{"city": "\1", "celsius": \d+\}', lines[1])
        lines = lines[2:]
    assert lines[0].startswith("answer: ")  # of the embedded model: a story


def test_rag_shared_prefix(printed_by: Printed) -> None:
    *questions, last = printed_by("rag_shared_prefix").splitlines()
    cached = [int(re.findall(r"(\d+) of \d+ prompt tokens", line)[0]) for line in questions]
    assert cached[0] == 0
    assert cached[1] > cached[2] > cached[3] > 0  # both passages alike, one, and only the instruction
    assert re.fullmatch(r"[1-9]\d% of all prompt tokens were not computed again", last)


def test_embeddings(printed_by: Printed) -> None:
    lines = printed_by("embeddings").splitlines()
    assert len(lines) == 6
    for line, word in zip(lines[1::2], ("fox", "lighthouse", "cake"), strict=True):
        score, passage = re.findall(r"^    (0\.\d{3})  (.*)$", line)[0]
        assert word in passage
        assert float(score) > 0.5


@pytest.mark.thorough
def test_capacity_planning(printed_by: Printed) -> None:
    text = printed_by("capacity_planning")
    throughput = {
        name: int(tokens) for name, tokens in re.findall(r"^ *(\d+ (?:slots|requests)).*? (\d+) tokens a", text, re.M)
    }
    assert list(throughput) == ["4 slots", "16 slots", "2 requests", "10 requests", "50 requests"]
    assert throughput["2 requests"] == pytest.approx(2 * 30, rel=0.3)
    assert throughput["2 requests"] < throughput["10 requests"]


def test_every_example_has_a_test_and_says_how_to_run_it() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {name.removeprefix("test_") for name in globals() if name.removeprefix("test_") in names}
    for name in names:
        assert f"python examples/{name}.py" in (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
