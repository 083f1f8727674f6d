"""`inflight demo --pictures`: the embedded picture model captions a dozen drawings, shown in the terminal."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from inflight.contracts.api.errors import InvalidRequestError
from inflight.picture_model import PICTURE_MODEL
from inflight.picture_model.drawing import PROMPT, draw, scenes
from inflight.text.media import NEEDS_PILLOW

if TYPE_CHECKING:
    from PIL.Image import Image
    from rich.text import Text

COUNT = 12
SIDE = 24
"""Columns of a picture; a row of characters shows two rows of pixels."""


def show_pictures(slots: int) -> None:
    """Draw scenes that the model never saw, caption all at once, and print them, each with its caption.

    Without colours, only the captions are printed. Raises `InvalidRequestError` without Pillow.
    """
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise InvalidRequestError(NEEDS_PILLOW) from error
    from rich.columns import Columns
    from rich.console import Console
    from rich.text import Text

    from inflight import LLM, SamplingParams

    random, console = Random(), Console()
    drawn = random.sample(scenes(held_out=True), COUNT)
    pictures = [draw(scene, random) for scene in drawn]
    parts = [[{"type": "image", "image": each}, {"type": "text", "text": PROMPT}] for each in pictures]
    llm = LLM(PICTURE_MODEL, max_num_seqs=slots)
    params = SamplingParams(temperature=0, max_tokens=30)
    outputs = llm.chat([[{"role": "user", "content": each}] for each in parts], params, use_tqdm=False)
    captions = [output.outputs[0].text for output in outputs]
    right = [caption == scene.caption for caption, scene in zip(captions, drawn, strict=True)]
    shown = []
    for picture, caption, is_right in zip(pictures, captions, right, strict=True):
        mark = Text("✓ ", "green") if is_right else Text("✗ ", "red")
        blocks = as_blocks(picture, SIDE) if console.color_system else Text()
        shown.append(Text.assemble(blocks, mark, (caption, "default"), "\n"))
    console.print(Columns(shown, width=SIDE, padding=(0, 2)) if console.color_system else Text("").join(shown))
    console.print(
        f"{sum(right)} of {COUNT} captions are right; the model never saw these combinations. Your own picture: "
        f'inflight generate -m "{PICTURE_MODEL}" --image FILE "{PROMPT}"',
        highlight=False,
        soft_wrap=True,
    )


def as_blocks(image: Image, side: int) -> Text:
    """An image in RGB as `side` columns and half as many lines of "▀", each in the colours of an upper and a lower
    pixel."""
    from rich.style import Style
    from rich.text import Text

    pixels, text = image.resize((side, side)).load(), Text()
    assert pixels is not None
    for y in range(0, side, 2):
        for x in range(side):
            upper, lower = ("#{:02x}{:02x}{:02x}".format(*pixels[x, below]) for below in (y, y + 1))  # type: ignore[misc]
            text.append("▀", Style(color=upper, bgcolor=lower))
        text.append("\n")
    return text
