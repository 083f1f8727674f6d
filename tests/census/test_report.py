"""Findings as documents, the process for each class, and the command."""

import json
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from inflight.census import runner
from inflight.census.finding import Finding, first_line
from inflight.census.report import summary, to_json, to_markdown, versions
from inflight.census.runner import run_census
from inflight.cli import app

FINDINGS = [
    Finding("gpt2", "GPT2LMHeadModel", "exact", "packed", "", 1234, 0.76, 12, seconds=0.51),
    Finding("rwkv", "RwkvForCausalLM", "exact", "sequential", share_changed=0.2, num_distinct=9, in_one_piece=True),
    Finding("bloom", "BloomForCausalLM", "wrong", "rows", "1 of 8 requests: a|b", share_changed=0.9, num_distinct=1),
    Finding("blt", "BltForCausalLM", "refused", reason="a mask of its own"),
    Finding("cpmant", "CpmAntForCausalLM", "not causal", reason="later tokens"),
    Finding("gemma3n", "Gemma3nForConditionalGeneration", "not built", reason="ImportError: timm"),
]
VERSIONS = {"torch": "2", "processor": "abacus"}
CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "gpt-sw3": "GPT2LMHeadModel"}


def runs_instead(monkeypatch: pytest.MonkeyPatch, code: str, speaks_first: bool = False) -> None:
    """Run this code as the process of each class; with `speaks_first`, wait until it has printed something."""
    popen = subprocess.Popen

    def start(_: object, **options: Any) -> "subprocess.Popen[str]":
        process = popen([sys.executable, "-c", code], **options)
        if speaks_first:
            select.select([process.stdout], [], [])
        return process

    monkeypatch.setattr(runner.subprocess, "Popen", start)


def test_the_summary_counts_what_could_have_been_exact() -> None:
    assert summary(FINDINGS) == (
        "2 of 4 decoder-only language models are exact (1 packed, 1 sequential); 1 wrong, 1 refused. "
        "Apart from these: 1 not causal, 1 not built."
    )
    assert summary(FINDINGS[:1]) == "1 of 1 decoder-only language models are exact (1 packed)."


def test_the_document_does_not_depend_on_the_order_of_findings() -> None:
    document = to_markdown(FINDINGS, VERSIONS)
    assert document == to_markdown(FINDINGS[::-1], VERSIONS)
    assert to_json(FINDINGS, VERSIONS) == to_json(FINDINGS[::-1], VERSIONS)
    assert "torch 2, processor abacus" in document
    assert "| gpt2 | `GPT2LMHeadModel` |  | packed | yes | 76% | 12 |  | 1,234 | 0.5 |" in document
    assert "| rwkv | `RwkvForCausalLM` |  | sequential (prompts whole) | yes | 20% (small) | 9 |" in document
    assert "| bloom | `BloomForCausalLM` |  | rows | no: wrong | 90% | 1 (small) | 1 of 8 requests: a\\|b |" in document
    assert "| cpmant | `CpmAntForCausalLM` | later tokens |" in document
    assert document.index("## Exact") < document.index("## Not exact") < document.index("## Not built")


def test_a_census_of_some_classes_says_which() -> None:
    document = to_markdown(FINDINGS[:1], VERSIONS, ["gpt2", "BloomForCausalLM"])
    assert "Made by `inflight census --class gpt2 --class BloomForCausalLM`; not edited" in document
    assert "For `gpt2`, `BloomForCausalLM`, out of the classes that" in document
    assert "every class" not in document
    stored = Path(__file__).parents[2] / "benchmarks" / "results" / "census.md"
    assert stored.read_text(encoding="utf-8").startswith(to_markdown([], VERSIONS).partition("torch 2,")[0])


def test_json_has_every_finding() -> None:
    read = json.loads(to_json(FINDINGS, VERSIONS))
    assert read["versions"] == VERSIONS
    assert {each["model_type"]: each["outcome"] for each in read["findings"]}["bloom"] == "wrong"
    assert Finding.from_json(FINDINGS[0].to_json()) == FINDINGS[0]
    assert set(versions()) == {"inflight", "torch", "transformers", "processor"}


def test_an_error_is_one_line_with_its_cause() -> None:
    assert first_line(ValueError("too few\nby one\nmore")) == "too few by one"
    error = RuntimeError("could not be packed")
    error.__cause__ = KeyError("weight")
    assert first_line(error) == "RuntimeError: could not be packed (because of KeyError: 'weight')"


def test_classes_are_named_by_type_or_by_class() -> None:
    assert list(runner.select(CLASSES, ())) == ["gpt-sw3", "gpt2", "llama"]
    assert list(runner.select(CLASSES, ("GPT2LMHeadModel",))) == ["gpt-sw3", "gpt2"]
    assert list(runner.select(CLASSES, ("llama",))) == ["llama"]
    with pytest.raises(ValueError, match="no language model class or model type 'lama'"):
        runner.select(CLASSES, ("lama",))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import time; time.sleep(60)", "no answer within 1 seconds"),
        ("import sys; print('bad luck', file=sys.stderr); sys.exit(3)", "the process ended with exit code 3: bad luck"),
        ("import os; os.abort()", "the process ended with exit code -6: it said nothing"),
    ],
)
def test_a_hang_and_a_crash_each_give_a_finding(monkeypatch: pytest.MonkeyPatch, code: str, reason: str) -> None:
    runs_instead(monkeypatch, code)
    (finding,) = run_census({"gpt2": "GPT2LMHeadModel"}, timeout=1 if "sleep" in code else 60)
    assert (finding.model_type, finding.outcome, finding.reason) == ("gpt2", "failed", reason)


def test_a_finding_is_kept_if_the_peer_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"import time; print({FINDINGS[0].to_json()!r}, flush=True); time.sleep(60)"
    runs_instead(monkeypatch, code, speaks_first=True)
    (finding,) = run_census({"gpt2": "GPT2LMHeadModel"}, timeout=1, peer=True)
    assert (finding.outcome, finding.peer) == ("exact", "no answer within 1 seconds")


@pytest.mark.thorough
def test_the_command_examines_two_classes(tmp_path: Path) -> None:
    path = tmp_path / "census.md"
    arguments = ["census", "--class", "gpt2", "--class", "BloomForCausalLM", "--jobs", "2", "--timeout", "600"]
    done = CliRunner().invoke(app, [*arguments, "--output", str(path)])
    assert (done.exit_code, done.stdout) == (0, "")
    assert "gpt2: exact packed\n" in done.stderr
    assert (
        "2 of 2 decoder-only language models are exact (1 packed, 1 rows; 1 recorded, without Python in a step)."
        in path.read_text()
    )


def test_the_slow_job_fails_if_something_is_wrong_or_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def exit_code(findings: list[Finding], *options: str) -> int:
        monkeypatch.setattr(runner, "run_census", lambda *args: findings)
        return CliRunner().invoke(app, ["census", "--class", "gpt2", *options]).exit_code

    exact = [finding for finding in FINDINGS if finding.outcome == "exact"]
    assert exit_code(exact, "--min-exact", str(len(exact))) == 0
    assert exit_code(exact, "--min-exact", str(len(exact) + 1)) == 1
    assert exit_code(FINDINGS, "--min-exact", "1") == 1, "a wrong token is never an option"
    assert exit_code(FINDINGS) == 0


def test_an_unknown_class_is_one_sentence() -> None:
    done = CliRunner().invoke(app, ["census", "--class", "nobody"])
    assert isinstance(done.exception, ValueError)
