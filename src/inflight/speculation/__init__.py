"""Proposes draft tokens, and decides how many are worth their rows. Knows tokens and plans, no tensor.

- `Speculation`: asks its drafters, and decides by cost how many draft tokens a step verifies.
- `Drafter`: one source of draft tokens. `Lookup`: the tokens that followed the same tokens before. `Constrained`: what
  a grammar allows.
- `DraftModelProposer`: those of a draft model, on the blocks of the model's own sequences (`DraftCache`).
"""

from inflight.speculation.constrained import Constrained
from inflight.speculation.draft_cache import DraftLayout
from inflight.speculation.draft_model import DraftModelProposer
from inflight.speculation.drafter import Drafter, DraftTokens
from inflight.speculation.lookup import Lookup
from inflight.speculation.speculation import Speculation

__all__ = ["Constrained", "DraftLayout", "DraftModelProposer", "DraftTokens", "Drafter", "Lookup", "Speculation"]
