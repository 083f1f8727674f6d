"""An aside: prompts with a common prefix compute it once and share its keys and values.

The prefix goes through the model as a batch of one; its keys and values are broadcast to all rows without a copy
(`expand`: a stride of zero), and only the suffixes are prefilled as a batch. Sharing prompts are found by content:
prompts are cut into chunks and grouped by the hash of the first chunks. vLLM's prefix caching and SGLang's
RadixAttention (Zheng et al., 2023) do this for requests that arrive at any time; here the batch is known beforehand.
Hydragen (Juravsky et al., 2024) shows how attention could also read the prefix only once for all rows.
"""

import hashlib
from collections.abc import Sequence
from typing import Unpack

import torch
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from inflight.lessons.run import CACHE, LessonRequest, Options, Run
from inflight.lessons.static_batching import generate_together, greedy, left_pad

CHUNK_SIZE = 16
"""Tokens in a chunk: prefixes are shared in whole chunks."""


@torch.inference_mode()
def generate_many(
    model: PreTrainedModel,
    requests: Sequence[LessonRequest],
    n_prefix_chunks: int,
    **options: Unpack[Options],
) -> Run:
    """Group requests by their first `n_prefix_chunks` chunks, and generate each group as one batch."""
    account = Run(requests, **options)
    prompts = [each.prompt_token_ids for each in requests]
    for group in group_by_prefix(prompts, n_prefix_chunks).values():
        account.log(f"group of {len(group)} requests with a common prefix")
        generate_batch(model, account, group)
    return account


def generate_batch(
    model: PreTrainedModel, account: Run, group: Sequence[int], temperature: float = 0.0, seed: int = 0
) -> None:
    """Generate for requests of `account` that share a prefix; if they share only a part of it, that part is used.

    Args:
        temperature: 0 is greedy; otherwise tokens are sampled, using `seed`.
    """
    prompts = [account.requests[request].prompt_token_ids for request in group]
    prefix_length = find_common_chunk_prefix(prompts)
    cache = DynamicCache()
    if prefix_length:
        prefix = torch.tensor([list(prompts[0][:prefix_length])], device=model.device)
        model(prefix, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
        account.ragged({0: (group[0], prefix_length, prefix_length)})
        cache = broadcast_kv(cache, len(group))
    input_ids, suffix_mask = left_pad([prompt[prefix_length:] for prompt in prompts], model.device)
    attention_mask = functional.pad(suffix_mask, (prefix_length, 0), value=1)
    generator = torch.Generator(device=model.device).manual_seed(seed)

    def sample(logits: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(torch.softmax(logits.float() / temperature, -1), 1, generator=generator)[:, 0]

    choose = sample if temperature > 0 else greedy
    generate_together(model, account, group, input_ids, attention_mask, cache, choose)


def find_common_chunk_prefix(prompts: Sequence[Sequence[int]], chunk_size: int = CHUNK_SIZE) -> int:
    """Return the length of the prompts' common prefix, in whole chunks; each prompt keeps at least one other token."""
    limit = min(map(len, prompts)) - 1
    length = 0
    while length + chunk_size <= limit:
        chunk = list(prompts[0][length : length + chunk_size])
        if any(list(prompt[length : length + chunk_size]) != chunk for prompt in prompts):
            break
        length += chunk_size
    return length


def group_by_prefix(
    prompts: Sequence[Sequence[int]], n_prefix_chunks: int, chunk_size: int = CHUNK_SIZE
) -> dict[str, list[int]]:
    """Return prompt indices by the hash of their first `n_prefix_chunks` chunks, in order of first appearance."""
    groups: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        prefix = ",".join(map(str, prompt[: n_prefix_chunks * chunk_size]))
        groups.setdefault(hashlib.sha256(prefix.encode()).hexdigest(), []).append(index)
    return groups


def broadcast_kv(cache: DynamicCache, batch_size: int) -> DynamicCache:
    """Return a cache whose `batch_size` rows are views on the one row of `cache`; nothing is copied."""
    broadcast = DynamicCache()
    for layer, past in enumerate(cache.layers):
        broadcast.update(past.keys[:, :, :0], past.values[:, :, :0], layer)  # creates the layer
        broadcast.layers[layer].keys = past.keys.expand(batch_size, -1, -1, -1)
        broadcast.layers[layer].values = past.values.expand(batch_size, -1, -1, -1)
    return broadcast
