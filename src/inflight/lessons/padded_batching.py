"""Rung 2, padded continuous batching: finished rows leave at once and new requests are merged into the running batch.

The batch stays a rectangle. `filter_batch` drops rows that are done (and the columns that only they needed);
`merge_batches` joins a freshly prefilled batch to the running one, padding the one with the shorter past. So no request
waits for the longest, but every row pays for the longest past, and a prefill stalls all other rows.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from inflight.lessons.run import LessonRequest, Options, Run
from inflight.lessons.static_batching import greedy, last_logits, left_pad

MOST_COLUMNS = 80
"""Columns of a rectangle in the log."""


@dataclass(slots=True)
class PaddedBatch:
    """B rows that are generated together.

    Attributes:
        requests, slots: the request of each row, and its slot.
        input_ids: `[B, L]` int64, the tokens to feed next: first the padded prompts, then one token per row.
        attention_mask: `[B, past + L]` int64: 0 for padding.
        cache: keys and values of the past, `[B, Hkv, past, D]` in each layer.
        tokens_remaining: how many more tokens each row may generate.
    """

    requests: list[int]
    slots: list[int]
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    cache: DynamicCache
    tokens_remaining: list[int]


@torch.inference_mode()
def run(model: PreTrainedModel, requests: Sequence[LessonRequest], num_slots: int, **options: Unpack[Options]) -> Run:
    """Generate greedily for all requests, with at most `num_slots` rows in the batch."""
    account = Run(requests, **options)
    queue = deque(range(len(requests)))
    free_slots = list(range(num_slots))
    batch: PaddedBatch | None = None
    while queue or batch:
        if admitted := account.take_arrived(queue, len(free_slots)):
            fresh = init_batch(model, account, admitted, [free_slots.pop(0) for _ in admitted])
            generate_next_token(model, fresh, account)
            if batch is not None:
                merged = merge_batches(batch, fresh)
                log_picture(account, "merge", [batch, fresh], merged)
            batch = fresh if batch is None else merged
        elif batch is not None:
            generate_next_token(model, batch, account)
        else:
            account.wait()
            continue
        before = batch
        batch, removed = filter_batch(batch, account)
        if removed:
            log_picture(account, "filter", [before], batch)
        free_slots = sorted(free_slots + removed)
    return account


def init_batch(model: PreTrainedModel, account: Run, requests: Sequence[int], slots: Sequence[int]) -> PaddedBatch:
    """Return a separate batch for newly admitted requests: left-padded prompts, nothing computed yet."""
    for request, slot in zip(requests, slots, strict=True):
        account.admit(request, slot)
    admitted = [account.requests[request] for request in requests]
    input_ids, attention_mask = left_pad([each.prompt_token_ids for each in admitted], model.device)
    return PaddedBatch(
        requests=list(requests),
        slots=list(slots),
        input_ids=input_ids,
        attention_mask=attention_mask,
        cache=DynamicCache(),
        tokens_remaining=[each.max_new_tokens for each in admitted],
    )


def generate_next_token(model: PreTrainedModel, batch: PaddedBatch, account: Run) -> None:
    """Run one forward pass: give every row its next token, and prepare the batch for the pass after."""
    rows = dict(zip(batch.slots, batch.requests, strict=True))
    account.rectangle(rows, batch.input_ids.shape[1], batch.attention_mask.shape[1])
    next_ids = greedy(last_logits(model, batch.input_ids, batch.attention_mask, batch.cache))
    for row, token in enumerate(next_ids.tolist()):
        is_last = account.add(batch.requests[row], token)
        batch.tokens_remaining[row] = 0 if is_last else batch.tokens_remaining[row] - 1
    batch.input_ids = next_ids[:, None]
    batch.attention_mask = functional.pad(batch.attention_mask, (0, 1), value=1)


def merge_batches(first: PaddedBatch, second: PaddedBatch) -> PaddedBatch:
    """Join the rows of both: pads the shorter past on the left and concatenates everything."""
    width = max(first.attention_mask.shape[1], second.attention_mask.shape[1])
    merged = DynamicCache()
    for layer, (a, b) in enumerate(zip(first.cache.layers, second.cache.layers, strict=True)):
        keys = torch.cat([pad_past(a.keys, width - 1), pad_past(b.keys, width - 1)])
        values = torch.cat([pad_past(a.values, width - 1), pad_past(b.values, width - 1)])
        merged.update(keys, values, layer)
    masks = [functional.pad(b.attention_mask, (width - b.attention_mask.shape[1], 0)) for b in (first, second)]
    return PaddedBatch(
        requests=first.requests + second.requests,
        slots=first.slots + second.slots,
        input_ids=torch.cat([first.input_ids, second.input_ids]),
        attention_mask=torch.cat(masks),
        cache=merged,
        tokens_remaining=first.tokens_remaining + second.tokens_remaining,
    )


def pad_past(states: torch.Tensor, length: int) -> torch.Tensor:
    """Pad keys or values `[B, Hkv, past, D]`, in the model's dtype, with zeros on the left to `[B, Hkv, length, D]`;
    the mask hides these."""
    return functional.pad(states, (0, 0, length - states.shape[2], 0))


def filter_batch(batch: PaddedBatch, account: Run) -> tuple[PaddedBatch | None, list[int]]:
    """Drop rows that are done and columns that are padding for all others; also return the slots that became free."""
    kept = [row for row, remaining in enumerate(batch.tokens_remaining) if remaining > 0]
    removed = [slot for row, slot in enumerate(batch.slots) if row not in kept]
    for row, slot in enumerate(batch.slots):
        if row not in kept:
            account.log_end(batch.requests[row], slot)
    if not removed:
        return batch, []
    if not kept:
        return None, removed
    rows = torch.tensor(kept, device=batch.input_ids.device)
    mask = batch.attention_mask[rows]
    num_unneeded = int(mask.argmax(dim=1).min())
    cache = DynamicCache()
    for layer, past in enumerate(batch.cache.layers):
        cache.update(past.keys[rows, :, num_unneeded:], past.values[rows, :, num_unneeded:], layer)
    left = PaddedBatch(
        requests=[batch.requests[row] for row in kept],
        slots=[batch.slots[row] for row in kept],
        input_ids=batch.input_ids[rows],
        attention_mask=mask[:, num_unneeded:],
        cache=cache,
        tokens_remaining=[batch.tokens_remaining[row] for row in kept],
    )
    return left, removed


def log_picture(account: Run, what: str, before: Sequence[PaddedBatch], after: PaddedBatch | None) -> None:
    """Log the rectangles before and after a merge or a filter: `#` is a token, `.` padding."""
    if not account.is_logged:
        return
    lines = [f"{what}:"]
    for sign, batches in ((" ", before[:1]), ("+", before[1:]), ("=", [after] if after is not None else [])):
        for batch in batches:
            rows = [f"slot {slot} req {request}" for slot, request in zip(batch.slots, batch.requests, strict=True)]
            width = max(map(len, rows))
            marks = ["".join(".#"[kept] for kept in row) for row in batch.attention_mask.tolist()]
            lines += [f"{sign} {row:{width}}  {_middle_cut(mark)}" for row, mark in zip(rows, marks, strict=True)]
    account.log("\n".join(lines if after is not None else [*lines, "= nothing"]))


def _middle_cut(marks: str) -> str:
    half = MOST_COLUMNS // 2
    return marks if len(marks) <= MOST_COLUMNS else f"{marks[:half]}…{marks[1 - half :]}"
