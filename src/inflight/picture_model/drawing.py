"""Draws what the embedded picture model was trained on: one or two coloured shapes on a pale, noisy ground.

A caption names the larger of two shapes first, so that each picture has one right caption.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from PIL.Image import Image

PROMPT = "Describe the picture."
SIDE = 96
"""Pixels on each side of a drawing; the model reads half as many."""
COLOURS = {
    "red": (215, 35, 35),
    "green": (35, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (245, 205, 20),
    "purple": (150, 50, 185),
    "black": (25, 25, 25),
}
SHAPES = {"circle": (16, 1.0, 0.0), "square": (4, 0.7071, 0.25), "triangle": (3, 0.5, 1.0), "star": (5, 0.4, 1.0)}
"""Of each: its corners, how far from the centre the points between these are, and the first corner's angle in π."""
RELATIONS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
"""The direction from the second, smaller thing to the first, x to the right and y downwards."""
OPPOSITES = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
Place: TypeAlias = tuple[float, float, float]
"""A thing's x, y and radius, in pixels."""


@dataclass(frozen=True)
class Scene:
    """What a picture shows: one thing such as "red circle", or two in a relation of `RELATIONS`."""

    first: str
    relation: str = ""
    second: str = ""

    @property
    def caption(self) -> str:
        """For example "a red circle left of a blue square", or "a green star"."""
        return f"a {self.first} {self.relation} a {self.second}" if self.relation else f"a {self.first}"

    @property
    def questions(self) -> list[tuple[str, str]]:
        """Questions with answers: "What is left of the blue square?", "a red circle". None about a single thing."""
        if not self.relation:
            return []
        sides = (self.first, self.relation, self.second), (self.second, OPPOSITES[self.relation], self.first)
        return [(f"What is {relation} the {known}?", f"a {asked}") for asked, relation, known in sides]


def scenes(held_out: bool) -> list[Scene]:
    """The tenth of all scenes with two different things that training never shows; or the others, and those with one
    thing."""
    things = [f"{colour} {shape}" for colour, shape in product(COLOURS, SHAPES)]
    pairs = [Scene(a, relation, b) for a, relation, b in product(things, RELATIONS, things) if a != b]
    Random(0).shuffle(pairs)
    count = len(pairs) // 10
    return pairs[:count] if held_out else pairs[count:] + [Scene(thing) for thing in things]


def draw(scene: Scene, random: Random) -> Image:
    """A drawing in RGB, `SIDE` pixels on each side, with random sizes, places, tints and noise. Raises `ImportError`
    without Pillow."""
    return paint(scene, place(scene, random), random)


def paint(scene: Scene, places: list[Place], random: Random) -> Image:
    """The same, with each thing in its place."""
    import numpy as np
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE, SIDE), _varied((230, 230, 230), 25, random))
    canvas = ImageDraw.Draw(image)
    for thing, (x, y, radius) in zip((scene.first, scene.second), places, strict=False):
        colour, shape = thing.split()
        corners, inner, start = SHAPES[shape]
        turn = start * math.pi + random.uniform(-0.15, 0.15)
        points = []
        for index in range(2 * corners):
            angle, distance = turn + index * math.pi / corners, radius * (inner if index % 2 else 1)
            points.append((x + distance * math.sin(angle), y + distance * math.cos(angle)))
        canvas.polygon(points, fill=_varied(COLOURS[colour], 20, random))
    noise = np.frombuffer(random.randbytes(SIDE * SIDE * 3), np.uint8).reshape(SIDE, SIDE, 3) - np.float32(127.5)
    return Image.fromarray((np.asarray(image) + noise * random.uniform(0, 0.15)).clip(0, 255).astype(np.uint8))


def _varied(colour: tuple[int, int, int], most: int, random: Random) -> tuple[int, ...]:
    return tuple(min(255, max(0, value + random.randint(-most, most))) for value in colour)


def place(scene: Scene, random: Random) -> list[Place]:
    """A random place of each thing. Two lie apart, within 27 degrees of the direction of their relation."""
    radii = [random.uniform(23, 25), random.uniform(16, 18)] if scene.relation else [random.uniform(16, 30)]
    while True:
        places = [(random.uniform(r, SIDE - r), random.uniform(r, SIDE - r), r) for r in radii]
        if not scene.relation:
            return places
        right, down = RELATIONS[scene.relation]
        dx, dy = places[0][0] - places[1][0], places[0][1] - places[1][1]
        along, across = dx * right + dy * down, dx * down + dy * right
        if along > sum(radii) and abs(across) < along / 2:
            return places
