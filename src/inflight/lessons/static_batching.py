"""Rung 1, static batching: waves of requests, left-padded into a rectangle, each wave as long as its longest request.

A plain `model.generate` over a batch works like this. A request that is done keeps its slot until the whole wave is
done (its row goes on computing unused tokens), and waiting requests wait for the longest request of the wave.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Unpack

import torch
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from inflight.lessons.run import CACHE, LessonRequest, Options, Run


@torch.inference_mode()
def run(model: PreTrainedModel, requests: Sequence[LessonRequest], num_slots: int, **options: Unpack[Options]) -> Run:
    """Generate greedily for all requests, in waves of `num_slots`."""
    account = Run(requests, **options)
    queue, number = deque(range(len(requests))), 0
    while queue:
        wave = account.take_arrived(queue, num_slots)
        if not wave:
            account.wait()
            continue
        for slot, request in enumerate(wave):
            account.admit(request, slot)
        run_wave(model, wave, account)
        account.log(f"--- barrier: wave {number} is done ---")
        number += 1
    return account


def run_wave(model: PreTrainedModel, wave: Sequence[int], account: Run) -> None:
    """Run one wave from its prompts to the end of its longest request."""
    prompts = [account.requests[request].prompt_token_ids for request in wave]
    input_ids, attention_mask = left_pad(prompts, model.device)
    num_steps_before = len(account.steps)
    generate_together(model, account, wave, input_ids, attention_mask, DynamicCache(), greedy)
    num_steps = len(account.steps) - num_steps_before
    for slot, request in enumerate(wave):
        account.log_end(request, slot, of=num_steps)


def generate_together(
    model: PreTrainedModel,
    account: Run,
    group: Sequence[int],
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    cache: DynamicCache,
    choose: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Prefill the prompts of a group of requests, then decode all rows until each has its EOS or its last token.

    Args:
        input_ids: `[B, L]` int64, the tokens that are not in the cache yet.
        attention_mask: `[B, past + L]` int64: 0 for padding.
        choose: returns the next tokens `[B]` int64 of logits `[B, V]`.
    """
    running = set(range(len(group)))
    while running:
        next_ids = choose(last_logits(model, input_ids, attention_mask, cache))
        account.rectangle(dict(enumerate(group)), input_ids.shape[1], attention_mask.shape[1])
        for row, token in enumerate(next_ids.tolist()):
            if row in running and account.add(group[row], token):
                running.remove(row)
        input_ids = next_ids[:, None]
        attention_mask = functional.pad(attention_mask, (0, 1), value=1)


def last_logits(
    model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor, cache: DynamicCache
) -> torch.Tensor:
    """Feed `[B, L]` int64 tokens; return the logits `[B, V]`, in the model's dtype, of each row's last. A row's
    positions do not count padding.

    Args:
        attention_mask: `[B, past + L]` int64: 0 for padding.
    """
    positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    logits: torch.Tensor = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=positions[:, -input_ids.shape[1] :],
        **{CACHE: cache},
        use_cache=True,
        logits_to_keep=1,
    ).logits
    return logits[:, -1]


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Return the likeliest token `[B]` int64 of each row of logits `[B, V]`."""
    return logits.argmax(dim=-1)


def left_pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts as a left-padded rectangle `[B, longest]` int64, and its mask: 1 for tokens, 0 for padding."""
    width = max(map(len, prompts))
    rows = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(rows, device=device), torch.tensor(mask, device=device)
