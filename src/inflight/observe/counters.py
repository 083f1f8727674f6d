"""`StepCounters`: sums over a run's steps."""

from dataclasses import dataclass

from inflight.contracts.record import StepRecord


@dataclass(slots=True)
class StepCounters:
    """Sums over the steps of a run with `num_slots` slots; call `see` with each step's record."""

    num_slots: int
    num_steps: int = 0
    num_spans: int = 0

    def see(self, record: StepRecord) -> None:
        """Count one step."""
        self.num_steps += 1
        self.num_spans += len(record.spans)

    @property
    def occupancy(self) -> float:
        """Share of all slots, over all steps, in which a sequence ran."""
        return self.num_spans / max(1, self.num_steps * self.num_slots)
