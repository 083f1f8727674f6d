"""Structured output: which tokens may come next, so that a text follows a schema, a regular expression or a grammar.

`compiler` turns requests into matchers, `matcher` follows one sequence, and `mask_worker` computes a step's masks while
its forward pass runs. The automata are llguidance's (docs/structured-output.md says why). Knows tokens and bits;
nothing of scheduling, slots or tensors.
"""

from inflight.grammar.compiler import GrammarCompiler
from inflight.grammar.mask_worker import MaskHandle, MaskWorker, StepMasks
from inflight.grammar.matcher import GrammarError, GrammarMatcher

__all__ = ["GrammarCompiler", "GrammarError", "GrammarMatcher", "MaskHandle", "MaskWorker", "StepMasks"]
