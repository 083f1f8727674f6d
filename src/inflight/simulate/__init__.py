"""Capacity planning: the real scheduler and block pool on a virtual clock. No model, no tensors."""

from inflight.simulate.replicas import simulate_replicas
from inflight.simulate.requests import Lengths, SimulatedRequest, SyntheticLoad, replay
from inflight.simulate.simulated_engine import AcceptanceRate
from inflight.simulate.simulator import simulate
from inflight.simulate.step_cost import StepCost, WatchedCost, fit_cost

__all__ = [
    "AcceptanceRate",
    "Lengths",
    "SimulatedRequest",
    "StepCost",
    "SyntheticLoad",
    "WatchedCost",
    "fit_cost",
    "replay",
    "simulate",
    "simulate_replicas",
]
