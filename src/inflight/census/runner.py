"""Runs all classes, each in its own process, so that a hang or a crash is one finding. Knows no torch."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from inflight.census.finding import Finding, first_line

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def run_census(
    classes: Mapping[str, str],
    timeout: float,
    jobs: int = 1,
    peer: bool = False,
    items: str = "",
    on_finding: Callable[[Finding], None] = lambda _: None,
) -> list[Finding]:
    """Examine `classes` (model type to class name), `jobs` at a time, and returns findings in their order.

    Args:
        timeout: seconds that each class may take, including imports.
        peer: whether `transformers`' own continuous batching runs each model, too.
        items: what prompts have besides text: "images", "sounds" or "videos".
        on_finding: called with each finding as it arrives, from some thread.
    """

    def one(model_type: str) -> Finding:
        finding = examine_apart(model_type, classes[model_type], timeout, peer, items)
        on_finding(finding)
        return finding

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, classes))


def examine_apart(model_type: str, model_class: str, timeout: float, peer: bool = False, items: str = "") -> Finding:
    """Examine one class in its own process; without an answer, the finding says how it ended.

    Args:
        timeout: seconds to wait for it.
    """
    options = ["--peer"] * peer + (["--with", items] if items else [])
    command = [sys.executable, "-m", "inflight.census", model_type, *options]
    start = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | ENVIRONMENT
    )
    try:
        answers, errors = process.communicate(timeout=timeout)
        end = f"the process ended with exit code {process.returncode}: {_last_line(errors)}"
    except subprocess.TimeoutExpired:
        process.kill()
        answers, errors = process.communicate()
        end = f"no answer within {timeout:.0f} seconds"
    findings = [Finding.from_json(line) for line in answers.splitlines()]
    if not findings:
        return Finding(model_type, model_class, "failed", reason=end, seconds=time.monotonic() - start)
    if peer and len(findings) == 1 and findings[0].num_parameters:
        return replace(findings[0], peer=end)
    return findings[-1]


def select(classes: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return the classes in `names` (model types or class names), or all if `names` is empty, sorted by model type.

    Raises `ValueError` for a name that does not exist.
    """
    for name in names:
        if name not in classes and name not in classes.values():
            raise ValueError(f"there is no language model class or model type {name!r} in transformers")
    return {
        model_type: classes[model_type]
        for model_type in sorted(classes)
        if not names or model_type in names or classes[model_type] in names
    }


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return first_line(lines[-1]) if lines else "it said nothing"
