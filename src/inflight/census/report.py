"""Writes findings as Markdown and as JSON. Decides only their form and order."""

import json
import platform
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from inflight.census.finding import MIN_DISTINCT, MIN_SHARE, Finding, Outcome, shortened

MAX_REASON, MAX_PEER = 300, 100
"""Most characters of a reason and of a peer's result in a table; JSON keeps more."""

EXECUTORS = ("packed", "rows", "sequential", "generate")
NO_CAUSAL_LM: tuple[Outcome, ...] = ("not causal", "not built")

INTRODUCTION = """\
For {classes}: a tiny model with random weights, rescaled until
its next token depends on tokens far back, runs a ragged workload (eight greedy requests with prompts of 1 to 60 tokens,
chunked, preempted, mixed) through `LLM(model)` in float32. **Exact**: every token is the argmax of the plain model's
logits, computed without a cache in one forward pass over everything, or within 1e-4 of their range of it, or the argmax
of a pass over just what comes before it (layers that select by rank break ties otherwise in a longer row). *Context*:
the share of the plain model's argmaxes that other tokens far back change; *variety*: how many of its 24 greedy tokens
differ. Where one of them is small, "exact" says less.
"""


WITH_ITEMS = """\
For {classes}: a tiny model with random weights, rescaled until its next token depends on tokens far back, answers five
prompts with {items} through `LLM(model, processor)` in float32; the processor is the class's
own, with tiny settings. They run beside each other, in chunks that end within these (or, where the tokens of an image
see each other, in one piece), and again from the cache. **Exact**: every token is that of the plain model's `generate`,
or within 1e-4 of its logits' range of it. *Context*, *variety*: how much the model depends on its context, as in the
census of text.
"""


GIVEN = {
    "images": "up to three images of odd sizes",
    "sounds": "a sound of one of three lengths, or none,",
    "videos": "a video of two to six frames, or none,",
}
CLASSES = {
    "images": "image-text-to-text",
    "sounds": "a multimodal one with a feature extractor",
    "videos": "a multimodal one with a video processor",
}
"""What prompts have, and what `transformers` maps the classes to."""


def versions() -> dict[str, str]:
    """Return the versions for which the findings hold."""
    return {
        "inflight": version("inflight-llm"),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "processor": _processor(),
    }


def to_json(findings: Iterable[Finding], made_with: dict[str, str]) -> str:
    """Return all findings with the versions, as JSON."""
    return json.dumps({"versions": made_with, "findings": [asdict(each) for each in _ordered(findings)]}, indent=2)


def to_markdown(
    findings: Iterable[Finding], made_with: dict[str, str], names: Sequence[str] = (), items: str = ""
) -> str:
    """Return the document: versions, summary, and a table for each kind of outcome.

    Args:
        names: the classes and model types that were asked for; none: all were.
        items: what prompts had besides text: "images", "sounds" or "videos".
    """
    findings = _ordered(findings)
    causal = [each for each in findings if each.outcome not in NO_CAUSAL_LM]
    inexact = [each for each in causal if each.outcome != "exact"]
    num_tokens, num_ties = sum(each.num_tokens for each in findings), sum(each.num_near_ties for each in findings)
    parts = [
        _introduction(names, items),
        ", ".join(f"{name} {value}" for name, value in made_with.items()) + "\n",
        f"**{summary(findings)}**\n",
        f"{num_tokens:,} tokens were compared"
        + ("" if items else f"; {num_ties} of them are not the argmax of the one pass, but as good")
        + ".\n",
    ]
    with_peer = any(each.peer for each in findings)
    if exact := [each for each in causal if each.outcome == "exact"]:
        parts += ["## Exact\n", _table(exact, with_peer)]
    if inexact:
        parts += ["## Not exact\n", _table(inexact, with_peer)]
    if others := [each for each in findings if each.outcome == "not causal"]:
        parts += ["## No decoder-only language models\n", _short_table(others)]
    if others := [each for each in findings if each.outcome == "not built"]:
        parts += ["## Not built\n", _short_table(others)]
    return "\n".join(parts)


def _introduction(names: Sequence[str], items: str) -> str:
    path = f"benchmarks/results/census{items and f'_{items}'}.md"
    options = (items and f" --{items}") + ("".join(f" --class {name}" for name in names) or f" --output {path}")
    whole = "a causal language model or to a multimodal one, given text alone"
    some = "causal language models and to multimodal ones, given text alone"
    if items:
        whole = some = CLASSES[items]
    classes = f"every class that `transformers` maps to {whole}"
    if names:
        classes = f"{', '.join(f'`{name}`' for name in names)}, out of the classes that `transformers` maps to {some}"
    template = WITH_ITEMS if items else INTRODUCTION
    text = textwrap.fill(
        template.format(classes=classes, items=GIVEN.get(items)), 120, break_long_words=False, break_on_hyphens=False
    )
    made = f"Made by `inflight census{options}`; not edited by hand."
    return f"# Census of language models{items and f' with {items}'}\n\n{made}\n\n{text}\n"


def summary(findings: Sequence[Finding]) -> str:
    """Return a sentence with the numbers of exact models, by executor, and of the others, by finding."""
    causal = [each for each in findings if each.outcome not in NO_CAUSAL_LM]
    counts = Counter(each.outcome for each in findings)
    ways = Counter(each.executor for each in causal if each.outcome == "exact")
    recorded = sum(each.is_recorded for each in causal if each.outcome == "exact")
    how = ", ".join(f"{ways[name]} {name}" for name in EXECUTORS if ways[name])
    how += f"; {recorded} recorded, without Python in a step" if recorded else ""
    rest = ", ".join(f"{counts[name]} {name}" for name in ("wrong", "refused", "failed") if counts[name])
    apart = ", ".join(f"{counts[name]} {name}" for name in NO_CAUSAL_LM if counts[name])
    sentence = f"{counts['exact']} of {len(causal)} decoder-only language models are exact"
    sentence += f" ({how})" if how else ""
    sentence += f"; {rest}" if rest else ""
    return sentence + (f". Apart from these: {apart}." if apart else ".")


def _ordered(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda each: each.model_type)


def _table(findings: Sequence[Finding], with_peer: bool) -> str:
    columns = [
        "model type",
        "class",
        "also reads",
        "executor",
        "exact",
        "context",
        "variety",
        "why not",
        "parameters",
        "s",
    ]
    rows = [
        [
            each.model_type,
            f"`{each.model_class}`",
            each.takes,
            (each.executor or "")
            + (" (recorded)" if each.is_recorded else "")
            + (" (prompts whole)" if each.in_one_piece else ""),
            "yes" if each.outcome == "exact" else f"no: {each.outcome}",
            f"{each.share_changed:.0%}" + (" (small)" if each.share_changed < MIN_SHARE else ""),
            f"{each.num_distinct}" + (" (small)" if each.num_distinct < MIN_DISTINCT else ""),
            shortened(each.reason, MAX_REASON),
            f"{each.num_parameters:,}",
            f"{each.seconds:.1f}",
            *([shortened(each.peer, MAX_PEER)] if with_peer else []),
        ]
        for each in findings
    ]
    return _markdown([*columns, *(["transformers' own batching"] if with_peer else [])], rows)


def _short_table(findings: Sequence[Finding]) -> str:
    rows = [[each.model_type, f"`{each.model_class}`", shortened(each.reason, MAX_REASON)] for each in findings]
    return _markdown(["model type", "class", "why"], rows)


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _processor() -> str:
    processor = platform.processor() or platform.machine()
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), processor)
