"""How many engines a Ray Serve deployment needs: an `AutoscalingConfig.policy`, and what replicas report to it.

Decides what a full engine is. When to scale, and how fast, is Serve's: delays, factors and bounds of the configuration.
"""

from typing import TYPE_CHECKING, Any

from inflight.contracts.record import EngineStats

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

TARGET_LOAD = 0.8
"""How full engines should be. With less room, a burst would wait until another engine is loaded."""

POLICY = f"{__name__}:replicas_wanted"


def reported(stats: EngineStats, max_num_seqs: int) -> dict[str, float]:
    """What a replica reports (`record_autoscaling_stats`).

    `load` is how often its sequences, running and waiting, would fill the engine. An engine is full when all slots are
    taken, or when sequences wait because there is no room in its cache for more than those that run. `slots` is how
    many sequences it holds when it is full.
    """
    is_full = stats.num_waiting > 0
    slots = max(1, stats.num_running) if is_full else max_num_seqs
    return {"load": (stats.num_running + stats.num_waiting) / slots, "slots": float(slots)}


def replicas_wanted(context: "AutoscalingContext") -> tuple[float, dict[str, Any]]:
    """How many replicas there should be for what they have to do, and for what waits before them.

    Until a replica has reported, there stay as many as there are.
    """
    metrics = context.aggregated_metrics or {}
    loads, slots = metrics.get("load", {}), metrics.get("slots", {})
    if not loads or not slots:
        return context.target_num_replicas, {}
    mean_slots = sum(slots.values()) / len(slots)
    load = sum(loads.values()) + context.total_queued_requests / mean_slots
    return load / TARGET_LOAD, {}
