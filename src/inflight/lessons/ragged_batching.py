"""Rung 3, ragged batching: each step picks the requests to run, and all their tokens go through as one row.

There is no rectangle and no padding: each sequence's uncomputed tokens (a whole prompt, or the last token) are
concatenated, each with its own position. Keys and values of the past are laid end to end as well, and a mask keeps
sequences apart: block-diagonal (a token sees only its own sequence) and causal. A prefill shares a forward pass with
the decodes of other requests. One waste remains: each step joins all pasts and splits them again, which paging avoids.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Unpack

import torch
from transformers import DynamicCache, PreTrainedModel

from inflight.lessons.run import CACHE, LessonRequest, Options, Run


@dataclass(slots=True)
class Stream:
    """A running request: the tokens that it owes the model, and its own cache of the tokens before."""

    request: int
    pending: list[int]
    cache: DynamicCache = field(default_factory=DynamicCache)

    @property
    def num_past(self) -> int:
        """Tokens in the cache."""
        return int(self.cache.get_seq_length())


@torch.inference_mode()
def run(model: PreTrainedModel, requests: Sequence[LessonRequest], num_slots: int, **options: Unpack[Options]) -> Run:
    """Generate greedily for all requests, at most `num_slots` at once; a free slot is reused in the very next step.

    Raises `ValueError` for a model with sliding windows: the mask of this lesson does not know them.
    """
    if getattr(model.config, "sliding_window", None) and getattr(model.config, "use_sliding_window", True):
        raise ValueError(f"{type(model).__name__} has sliding windows, which this lesson's mask does not know")
    account = Run(requests, **options)
    queue = deque(range(len(requests)))
    slots: dict[int, Stream] = {}
    while queue or slots:
        free = [slot for slot in range(num_slots) if slot not in slots]
        for slot, request in zip(free, account.take_arrived(queue, len(free)), strict=False):
            account.admit(request, slot)
            slots[slot] = Stream(request, list(requests[request].prompt_token_ids))
        if not slots:
            account.wait()
            continue
        account.ragged({slot: (s.request, len(s.pending), s.num_past + len(s.pending)) for slot, s in slots.items()})
        next_ids = forward_ragged(model, list(slots.values()))
        for (slot, stream), token in zip(list(slots.items()), next_ids, strict=True):
            stream.pending = [token]
            if account.add(stream.request, token):
                account.log_end(stream.request, slot)
                del slots[slot]
    return account


def forward_ragged(model: PreTrainedModel, streams: Sequence[Stream]) -> list[int]:
    """Feed all pending tokens as one row, update every stream's cache, and return each stream's next token."""
    device = model.device
    tokens = [token for stream in streams for token in stream.pending]
    positions = [stream.num_past + i for stream in streams for i in range(len(stream.pending))]
    last_rows = torch.tensor([len(stream.pending) for stream in streams], device=device).cumsum(dim=0) - 1
    packed = pack_caches(streams)
    logits = model(
        input_ids=torch.tensor([tokens], device=device),
        position_ids=torch.tensor([positions], device=device),
        attention_mask=ragged_mask(streams, model.dtype, device),
        **{CACHE: packed},
        use_cache=True,
        logits_to_keep=last_rows,
    ).logits[0]
    scatter_new(packed, streams)
    next_ids: list[int] = logits.argmax(dim=-1).tolist()
    return next_ids


def pack_caches(streams: Sequence[Stream]) -> DynamicCache:
    """Return the pasts of all streams end to end, as the cache of one row."""
    packed = DynamicCache()
    started = [stream for stream in streams if stream.num_past]
    for layer in range(len(started[0].cache.layers) if started else 0):
        keys = torch.cat([stream.cache.layers[layer].keys for stream in started], dim=2)
        values = torch.cat([stream.cache.layers[layer].values for stream in started], dim=2)
        packed.update(keys, values, layer)
    return packed


def scatter_new(packed: DynamicCache, streams: Sequence[Stream]) -> None:
    """Append each stream's new keys and values, which come after all pasts, to its own cache."""
    num_pending = [len(stream.pending) for stream in streams]
    for layer, states in enumerate(packed.layers):
        keys = states.keys[:, :, -sum(num_pending) :].split(num_pending, dim=2)
        values = states.values[:, :, -sum(num_pending) :].split(num_pending, dim=2)
        for stream, new_keys, new_values in zip(streams, keys, values, strict=True):
            stream.cache.update(new_keys, new_values, layer)


def ragged_mask(streams: Sequence[Stream], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the mask `[1, 1, tokens, past + tokens]` in `dtype`: 0 where a token may attend, else the lowest number.

    Columns are the pasts of all streams end to end, then the new tokens of all streams end to end.
    """
    owners, num_past = range(len(streams)), [stream.num_past for stream in streams]
    num_new = [len(stream.pending) for stream in streams]
    past = [(owner, i) for owner in owners for i in range(num_past[owner])]
    new = [(owner, num_past[owner] + i) for owner in owners for i in range(num_new[owner])]
    query_owner, query_position = torch.tensor(new, device=device).T
    key_owner, key_position = torch.tensor(past + new, device=device).T
    allowed = query_owner[:, None] == key_owner[None, :]
    allowed &= key_position[None, :] <= query_position[:, None]
    mask = torch.zeros(allowed.shape, dtype=dtype, device=device)
    return mask.masked_fill(~allowed, torch.finfo(dtype).min)[None, None]
