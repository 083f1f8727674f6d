"""The small embedded model, which writes little stories: configuration, tokenizer and weights. `REPORT.md` tells how it
was made. Data, no code."""

from pathlib import Path

DEMO_MODEL = Path(__file__).parent
"""Its folder."""
