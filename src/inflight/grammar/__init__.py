"""Structured output: token masks by which a text follows a schema, a regular expression or a grammar.

`compiler` turns requests into matchers, `matcher` tracks one sequence, and `mask_worker` computes a step's masks while
its forward pass runs. The automata are llguidance's (docs/structured-output.md). Knows nothing of scheduling, slots or
tensors.
"""

from inflight.grammar.compiler import GrammarCompiler
from inflight.grammar.mask_worker import MaskHandle, MaskWorker, StepMasks
from inflight.grammar.matcher import GrammarError, GrammarMatcher

__all__ = ["GrammarCompiler", "GrammarError", "GrammarMatcher", "MaskHandle", "MaskWorker", "StepMasks"]
