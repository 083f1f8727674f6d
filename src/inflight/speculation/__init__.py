"""Which tokens may come next, and how many of them are worth a row each. Pure Python; knows tokens, no model.

- `Speculation`: asks its guessers, and decides by cost how many of their tokens a step computes.
- `Guesser`: one way to guess. `Lookup`: what followed the same tokens before. `Constrained`: what a grammar allows.
- `StepTimes`: how long steps take here, by their tokens.
"""

from inflight.speculation.constrained import Constrained
from inflight.speculation.guesser import Guess, Guesser
from inflight.speculation.lookup import Lookup
from inflight.speculation.speculation import Speculation
from inflight.speculation.step_times import StepTimes

__all__ = ["Constrained", "Guess", "Guesser", "Lookup", "Speculation", "StepTimes"]
