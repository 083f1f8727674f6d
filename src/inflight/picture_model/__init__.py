"""The small embedded model that captions drawings of shapes: configuration, processor and weights, and `drawing`, which
draws what it was trained on. `REPORT.md` tells how it was made."""

from pathlib import Path

PICTURE_MODEL = Path(__file__).parent
"""Its folder."""
