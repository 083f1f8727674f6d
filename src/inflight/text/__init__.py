"""Text to token ids and back: tokenizer, chat template, incremental detokenizer, stop strings.

Knows nothing of models and steps.
"""

from inflight.text.detokenizer import IncrementalDetokenizer
from inflight.text.output_text import OutputText, StopStrings
from inflight.text.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "OutputText", "StopStrings", "Tokenizer"]
