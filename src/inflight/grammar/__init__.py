"""Structured output: which tokens may come next, so that a text is what a schema, a regex or a grammar asks for.

`compiler` turns what was asked into matchers, `matcher` follows one sequence, `mask_worker` computes a step's masks
while its forward pass runs. The automata are llguidance's (why that one: docs/structured-output.md). Knows tokens and
bits; nothing of scheduling, slots or tensors.
"""

from inflight.grammar.compiler import GrammarCompiler
from inflight.grammar.mask_worker import MaskHandle, MaskWorker, StepMasks
from inflight.grammar.matcher import GrammarError, GrammarMatcher

__all__ = ["GrammarCompiler", "GrammarError", "GrammarMatcher", "MaskHandle", "MaskWorker", "StepMasks"]
