"""`Scores`: the figures of a run, computed from its account, and the table that compares runs."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from rich.table import Column, Table

from inflight.lessons.run import Run

HEADINGS = (
    *("wall\ntime", "\nsteps", "tokens\n/s", "slots\nused", "padding:\ntokens", "\nkeys"),
    *("latency\np50", "\np95", "first\ntoken"),
)


@dataclass(frozen=True, slots=True)
class Scores:
    """One run in numbers. Requests all arrive at its start; times are in seconds.

    Attributes:
        seconds: from the start to the end of the last request.
        num_steps: forward passes.
        tokens_per_second: generated tokens over `seconds`.
        occupancy: share of all slots, over all steps, that computed something useful.
        token_padding: share of the tokens that went through the model that were padding.
        key_padding: share of the keys that rows attended over that were padding.
        latency_p50, latency_p95: from arrival to a request's last token.
        first_token_p50: from arrival to a request's first token.
    """

    seconds: float
    num_steps: int
    tokens_per_second: float
    occupancy: float
    token_padding: float
    key_padding: float
    latency_p50: float
    latency_p95: float
    first_token_p50: float

    @classmethod
    def from_run(cls, run: Run, num_slots: int) -> "Scores":
        """Return the scores of a run that has ended."""
        lanes = [lane for step in run.steps for lane in step.values()]
        num_useful = sum(lane.use != "padding" for lane in lanes)
        latencies = [(answer.finished_time or 0.0) - run.start_time for answer in run.answers]
        first_tokens = [(answer.first_token_time or 0.0) - run.start_time for answer in run.answers]
        return cls(
            seconds=run.seconds,
            num_steps=len(run.steps),
            tokens_per_second=run.num_generated / run.seconds,
            occupancy=num_useful / (len(run.steps) * num_slots),
            token_padding=sum(lane.num_padding for lane in lanes) / sum(lane.num_tokens for lane in lanes),
            key_padding=sum(lane.num_padding_keys for lane in lanes) / sum(lane.num_keys for lane in lanes),
            latency_p50=float(np.percentile(latencies, 50)),
            latency_p95=float(np.percentile(latencies, 95)),
            first_token_p50=float(np.percentile(first_tokens, 50)),
        )


def scores_table(scores: Mapping[str, Scores]) -> Table:
    """Return a table with one row for each method."""
    headings = (Column(heading, justify="right") for heading in HEADINGS)
    table = Table("method\n", *headings, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name, each in scores.items():
        shares = (each.occupancy, each.token_padding, each.key_padding)
        times = (each.latency_p50, each.latency_p95, each.first_token_p50)
        table.add_row(
            name,
            f"{each.seconds:.2f} s",
            str(each.num_steps),
            f"{each.tokens_per_second:.0f}",
            *(f"{share:.0%}" for share in shares),
            *(f"{seconds:.2f} s" for seconds in times),
        )
    return table
