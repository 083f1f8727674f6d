"""`step_figure`: the masks of a `StepView` as a picture. It needs matplotlib, but only when called."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from inflight.observe.pictures import new_figure
from inflight.observe.step_view import MaskView, StepView

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CELL = 0.2
"""Inches per cell, as long as there are few cells."""

MAX_NAMED = 64
"""Up to this many rows or columns are labelled with their tokens; more are labelled with their sequences only."""

MAX_TOKEN = 14
CACHED, OWN, OTHER = 0.45, 0.1, 0.0
"""The opacity of a cell in its sequence's colour: a visible cached key, an invisible key of the same sequence, a key of
another sequence. A visible new key is opaque."""


def step_figure(*views: StepView) -> "Figure":
    """Draw the masks of steps below each other: rows are the tokens fed, columns are the keys.

    Raises:
        ValueError: matplotlib is not installed.
    """
    drawn = [(view, mask) for view in views for mask in view.masks]
    width = np.clip(max(view.total_q + view.total_kv for view in views) * CELL, 6.5, 16)
    heights = [np.clip(view.total_q * CELL, 1, 16) + 1.7 for view, _ in drawn]
    figure = new_figure(width + 1.5, sum(heights) + 0.5 + 0.4 * len(views))
    titles = [f"step {view.step}: {view.sizes}\n{view.handovers or view.agreement}" for view in views]
    if len(views) == 1:
        figure.suptitle(titles[0], fontsize=9)
    rows = figure.subplots(len(drawn), squeeze=False, gridspec_kw={"height_ratios": heights}).flat
    for axes, (view, mask) in zip(rows, drawn, strict=True):
        _draw(axes, view, mask)
        if len(views) > 1:
            axes.set_title(f"{titles[views.index(view)]}\n{mask.heading}", fontsize=9, loc="left")
    _add_legend(figure)
    return figure


def _draw(axes: "Axes", view: StepView, mask: MaskView) -> None:
    spans, num_queries, num_keys = view.spans, view.total_q, view.total_q + view.total_kv
    axes.imshow(_colours(view, mask), interpolation="nearest", aspect="auto")
    names, row_middles, column_middles = [], [], []
    row = column = -0.5  # cell edges are at halves
    for span in spans:
        axes.hlines(row, -0.5, num_keys - 0.5, color="black", linewidth=0.8)
        axes.vlines(column, -0.5, num_queries - 0.5, color="black", linewidth=0.8)
        if span.num_cached:
            axes.vlines(column + span.num_cached, row, row + len(span.tokens), color="black", linestyle=":")
        names.append(f"{span.letter} {span.label}")
        row_middles.append(row + len(span.tokens) / 2)
        column_middles.append(column + len(span.keys) / 2)
        row, column = row + len(span.tokens), column + len(span.keys)
    above = axes.secondary_xaxis("top")
    above.set_xticks(column_middles, names, fontsize=8, rotation=30, ha="left")
    axes.set_xticks([])
    axes.set_yticks(row_middles, names, fontsize=8)
    if num_queries <= MAX_NAMED:
        labels = [f"{span.letter}  {_short(token)}" for span in spans for token in span.tokens]
        axes.set_yticks(range(num_queries), labels, fontsize=7, parse_math=False)
    if num_keys <= MAX_NAMED:
        labels = [_short(token) for span in spans for token in span.keys]
        axes.set_xticks(range(num_keys), labels, fontsize=7, rotation=90, parse_math=False)
        axes.set_xticks(np.arange(num_keys) - 0.5, minor=True)
        axes.set_yticks(np.arange(num_queries) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=0.8)
    axes.tick_params(which="both", length=0)
    axes.set_title(mask.heading, fontsize=9, loc="left")


def _colours(view: StepView, mask: MaskView) -> npt.NDArray[np.float64]:
    """Return RGB values `[T, K, 3]`: white, mixed with a share of the column's colour."""
    share = np.full(mask.allowed.shape, OTHER)
    colours = np.empty((mask.allowed.shape[1], 3))
    row = column = 0
    for span in view.spans:
        rows, columns = slice(row, row + len(span.tokens)), slice(column, column + len(span.keys))
        is_cached = np.arange(len(span.keys)) < span.num_cached
        share[rows, columns] = np.where(mask.allowed[rows, columns], np.where(is_cached, CACHED, 1.0), OWN)
        colours[columns] = [int(span.colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        row, column = rows.stop, columns.stop
    return 1 - share[:, :, None] * (1 - colours)


def _add_legend(figure: "Figure") -> None:
    from matplotlib.patches import Patch

    shades = (("may attend: cached key", CACHED), ("new key", 1.0), ("may not: later or too far", OWN))
    patches = [Patch(facecolor=str(1 - 0.7 * share), edgecolor="grey", label=name) for name, share in shades]
    patches.append(Patch(facecolor="white", edgecolor="grey", label="another sequence's"))
    figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=8, frameon=False)


def _short(token: str) -> str:
    return token if len(token) <= MAX_TOKEN else token[: MAX_TOKEN - 1] + "…"
