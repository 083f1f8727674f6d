"""Figure: what merging and filtering do to the rectangle of padded batching."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from inflight.contracts.api.config import EngineConfig
from inflight.demo_model import DEMO_MODEL
from inflight.execution.hf.load import load_model
from inflight.lessons.padded_batching import PaddedBatch, filter_batch, generate_next_token, init_batch, merge_batches
from inflight.lessons.run import LessonRequest, Run
from inflight.observe.pictures import new_figure
from tools.figures.drawing import DECODE, INK, PADDING, PREFILL, Drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REQUESTS = (LessonRequest([11] * 5, 6), LessonRequest([12] * 12, 14), LessonRequest([13] * 4, 9))
COLOURS = (PREFILL, DECODE, "#4c78c8")


@torch.inference_mode()
def merging() -> Drawing:
    """Draw a batch before and after one row is done and dropped, and before and after another joins."""
    model = load_model(str(DEMO_MODEL), EngineConfig(dtype="float32"))
    account, queue = Run(REQUESTS), deque(range(len(REQUESTS)))
    first = init_batch(model, account, account.take_arrived(queue, 2), [0, 1])
    for _ in range(REQUESTS[0].max_new_tokens):
        generate_next_token(model, first, account)
    left, _ = filter_batch(first, account)
    assert left is not None
    fresh = init_batch(model, account, account.take_arrived(queue, 1), [0])
    generate_next_token(model, fresh, account)
    merged = merge_batches(left, fresh)
    states = {
        "request 0 is done": [first],
        "its row is dropped (filter)": [left],
        "request 2 is prefilled beside it": [left, fresh],
        "both become one rectangle (merge)": [merged],
    }
    widest = max(batch.attention_mask.shape[1] for batches in states.values() for batch in batches)
    figure = new_figure(9, 2.2)
    for panel, (title, batches) in zip(figure.subplots(1, len(states)), states.items(), strict=True):
        _draw(panel, title, batches, widest)
    return Drawing(figure, _numbers(states))


def _draw(panel: "Axes", title: str, batches: Sequence[PaddedBatch], widest: int) -> None:
    row = 0.0
    for batch in batches:
        for request, kept in zip(batch.requests, batch.attention_mask.tolist(), strict=True):
            colours = [COLOURS[request] if is_token else PADDING for is_token in kept]
            panel.barh([row] * len(kept), 0.85, left=range(len(kept)), height=0.8, color=colours)
            panel.text(-0.6, row, str(request), ha="right", va="center", fontsize=7, color=INK)
            row += 1
        row += 0.6
    panel.set_xlim(-2, widest)
    panel.set_ylim(3.2, -0.8)
    panel.set_title(title, loc="left", fontsize=8)
    panel.axis("off")


def _numbers(states: Mapping[str, Sequence[PaddedBatch]]) -> dict[str, list[dict[str, int]]]:
    return {
        title: [
            {"places": batch.attention_mask.numel(), "padding": int((batch.attention_mask == 0).sum())}
            for batch in batches
        ]
        for title, batches in states.items()
    }
