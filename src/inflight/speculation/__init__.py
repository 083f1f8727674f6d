"""Which tokens may come next, and how many of them are worth a row each. Knows tokens and plans, no tensor.

- `Speculation`: asks its guessers, and decides by cost how many of their tokens a step computes.
- `Guesser`: one way to guess. `Lookup`: what followed the same tokens before. `Constrained`: what a grammar allows.
- `Drafting`: guesses of a draft model, on the blocks of the model's own sequences (`DraftCache`).
"""

from inflight.speculation.constrained import Constrained
from inflight.speculation.draft_cache import DraftLayout
from inflight.speculation.drafting import Drafting
from inflight.speculation.guesser import Guess, Guesser
from inflight.speculation.lookup import Lookup
from inflight.speculation.speculation import Speculation

__all__ = ["Constrained", "DraftLayout", "Drafting", "Guess", "Guesser", "Lookup", "Speculation"]
