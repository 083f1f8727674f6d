"""Autoscaling of a Ray Serve deployment: an `AutoscalingConfig.policy`, and the statistics that replicas report.

It defines a full engine. Serve's configuration has delays, factors and bounds.
"""

from typing import TYPE_CHECKING, Any

from inflight.contracts.record import EngineStats

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

TARGET_LOAD = 0.8
"""The target load of engines, with room for bursts until another engine is loaded."""

POLICY = f"{__name__}:replicas_wanted"


def reported(stats: EngineStats, max_num_seqs: int) -> dict[str, float]:
    """A replica's report (`record_autoscaling_stats`).

    `slots` is how many sequences the engine holds: `max_num_seqs`, or as many as there is room for in its cache, if all
    are as long as those that run. `load` is how often its sequences, running and waiting, would fill it.
    """
    num_blocks = stats.num_blocks_used + stats.num_blocks_cached + stats.num_blocks_free
    slots = float(max_num_seqs)
    if stats.num_blocks_used:
        slots = min(slots, max(1.0, stats.num_running * num_blocks / stats.num_blocks_used))
    return {"load": (stats.num_running + stats.num_waiting) / slots, "slots": slots}


def replicas_wanted(context: "AutoscalingContext") -> tuple[float, dict[str, Any]]:
    """The target number of replicas for their load and the queued requests.

    A replica that has not reported counts as the others do, since it may be too busy. Until one has reported, the
    number stays.
    """
    metrics = context.aggregated_metrics or {}
    loads, slots = metrics.get("load", {}), metrics.get("slots", {})
    if not loads or not slots:
        return context.target_num_replicas, {}
    mean_slots = sum(slots.values()) / len(slots)
    mean_load = sum(loads.values()) / len(loads)
    load = mean_load * len(context.running_replicas) + context.total_queued_requests / mean_slots
    return load / TARGET_LOAD, {}
