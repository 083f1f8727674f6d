"""Figure: which replica gets a request, compared in the simulator."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from inflight.contracts.api.config import ROUTINGS, EngineConfig
from inflight.observe.pictures import new_figure
from inflight.observe.run_report import RunReport
from inflight.simulate import Lengths, StepCost, SyntheticLoad, simulate_replicas
from tools.figures.drawing import ALARM, DECODE, PREFILL, Drawing, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_REPLICAS, NUM_REQUESTS = 4, 300
RATES = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
COST = StepCost.parse('{"fixed": 0.01, "per_token": 0.001}')
"""A thousand tokens a second, as one or two cores compute with a model of half a billion parameters."""
CONFIG = EngineConfig(max_num_seqs=32, num_blocks=700, max_model_len=2000)
"""A cache for ten prefixes and what runs."""
COLOURS = dict(zip(ROUTINGS, (DECODE, PREFILL, ALARM), strict=True))


def routing() -> Drawing:
    """Draw the time to the first token, and how much of the prompts is cached, at growing load."""
    reports = {each: [_simulated(each, rate) for rate in RATES] for each in ROUTINGS}
    figure = new_figure(9, 2.6)
    first, second, third = figure.subplots(1, 3)
    for panel, title, values in (
        (first, "time to first token, median (s)", _seconds(reports, "p50")),
        (second, "time to first token, 95th percentile (s)", _seconds(reports, "p95")),
        (
            third,
            "share of prompts found in the cache",
            {name: [r.hit_rate for r in of] for name, of in reports.items()},
        ),
    ):
        _draw(panel, title, values)
    figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    numbers = {
        name: [
            {
                "requests a second": rate,
                "time to first token, median ms": round(1000 * report.time_to_first_token.p50),
                "time to first token, 95th percentile ms": round(1000 * report.time_to_first_token.p95),
                "hit rate": round(report.hit_rate, 3),
            }
            for rate, report in zip(RATES, of_name, strict=True)
        ]
        for name, of_name in reports.items()
    }
    return Drawing(figure, numbers)


def _simulated(routing: str, rate: float) -> RunReport:
    load = SyntheticLoad(
        num_requests=NUM_REQUESTS,
        rate=rate,
        prompt_tokens=Lengths("fixed", 20),
        output_tokens=Lengths("exponential", 64),
        shared_prefix_tokens=1000,
        num_prefixes=20,
        max_model_len=CONFIG.max_model_len,
    )
    return simulate_replicas(load, CONFIG, COST, NUM_REPLICAS, routing)


def _seconds(reports: dict[str, list[RunReport]], name: str) -> dict[str, list[float]]:
    return {routing: [getattr(each.time_to_first_token, name) for each in of] for routing, of in reports.items()}


def _draw(panel: "Axes", title: str, values: dict[str, Sequence[float]] | dict[str, list[float]]) -> None:
    for name, of_name in values.items():
        panel.plot(RATES, of_name, marker="o", markersize=3, linewidth=1.2, color=COLOURS[name], label=name)
    panel.set_ylim(bottom=0)
    tidy(panel, title, "requests per second")
