"""`inflight census`: finds which causal language model classes of `transformers` run exactly, on tiny models."""

import sys
from collections import Counter
from pathlib import Path

import click

from inflight.cli.help import Command
from inflight.cli.options import quiet_libraries


@click.command(cls=Command)
@click.option("--class", "names", multiple=True, help="Only this class or model type; may be repeated.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the report here instead of to standard output.",
)
@click.option("--json", "as_json", is_flag=True, help="Report as JSON instead of Markdown.")
@click.option("--timeout", type=click.FloatRange(min=1), default=60.0, help="Most seconds per class.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, help="Classes examined at once.")
@click.option("--images", "items", flag_value="images", help="Examine the classes that read images, with images.")
@click.option("--sounds", "items", flag_value="sounds", help="Examine the classes that read sounds, with sounds.")
@click.option("--videos", "items", flag_value="videos", help="Examine the classes that read videos, with videos.")
@click.option("--peer", is_flag=True, help="Let transformers' own continuous batching run each model, too.")
@click.option(
    "--min-exact",
    type=click.IntRange(min=0),
    help="Exit with 1 if fewer classes are exact, or if any class gives a wrong token.",
)
def census(
    names: tuple[str, ...],
    output: Path | None,
    as_json: bool,
    timeout: float,
    jobs: int,
    items: str | None,
    peer: bool,
    min_exact: int | None,
) -> None:
    """Find which of transformers' causal language models run exactly.

    Builds and runs a tiny model of every class, and compares each token with the reference. Each class runs in its own
    process, so this takes a while. Progress goes to standard error.
    """
    quiet_libraries()
    from inflight.census.finding import Finding
    from inflight.census.report import summary, to_json, to_markdown, versions
    from inflight.census.runner import run_census, select
    from inflight.census.tiny_configs import CLASSES, CLASSES_WITH

    if items and peer:
        raise click.UsageError(f"--peer is for text; it cannot be given with --{items}")
    classes = select(CLASSES_WITH[items] if items else CLASSES, names)

    def tell(finding: Finding) -> None:
        how = finding.executor or ""
        print(f"{finding.model_type}: {finding.outcome} {how} {finding.reason}".rstrip(), file=sys.stderr, flush=True)

    findings = run_census(classes, timeout, jobs, peer, items or "", tell)
    print(summary(findings), file=sys.stderr)
    text = to_json(findings, versions()) if as_json else to_markdown(findings, versions(), names, items or "")
    if output is None:
        print(text)
    else:
        output.write_text(text + ("\n" if as_json else ""))
    outcomes = Counter(finding.outcome for finding in findings)
    if min_exact is not None and (outcomes["wrong"] or outcomes["exact"] < min_exact):
        sys.exit(1)
