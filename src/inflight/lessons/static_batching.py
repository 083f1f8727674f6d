"""Rung 1, static batching: waves of requests, left-padded into a rectangle, each wave as long as its longest request.

This is what a plain `model.generate` over a batch does. A request that is done keeps its slot until the whole wave is
done (its row goes on computing unused tokens), and waiting requests wait for the longest request of the wave.
"""

from collections.abc import Callable, Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from inflight.lessons.run import LessonRequest, Run


@torch.inference_mode()
def run(
    model: PreTrainedModel,
    requests: Sequence[LessonRequest],
    num_slots: int,
    eos_token_ids: Sequence[int] = (),
    log: Callable[[str], None] | None = None,
    watch: Callable[[Run], None] | None = None,
) -> Run:
    """Generate greedily for all requests, in waves of `num_slots`."""
    account = Run(requests, eos_token_ids, log, watch)
    for number, first in enumerate(range(0, len(requests), num_slots)):
        wave = range(first, min(first + num_slots, len(requests)))
        for slot, request in enumerate(wave):
            account.admit(request, slot)
        run_wave(model, wave, account)
        account.log(f"--- barrier: wave {number} is done ---")
    return account


def run_wave(model: PreTrainedModel, wave: Sequence[int], account: Run) -> None:
    """Run one wave from its prompts to the end of its longest request."""
    prompts = [account.requests[request].prompt_token_ids for request in wave]
    input_ids, attention_mask = left_pad(prompts, model.device)
    position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    cache, running, num_steps = DynamicCache(), set(range(len(wave))), 0
    while running:
        logits = model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        account.rectangle(dict(enumerate(wave)), input_ids.shape[1], attention_mask.shape[1])
        num_steps += 1
        next_ids = logits[:, -1].argmax(dim=-1)
        for slot, token in enumerate(next_ids.tolist()):
            if slot in running and account.add(wave[slot], token):
                running.remove(slot)
        input_ids = next_ids[:, None]
        attention_mask = torch.cat([attention_mask, attention_mask.new_ones(len(wave), 1)], dim=1)
        position_ids = position_ids[:, -1:] + 1
    for slot, request in enumerate(wave):
        num_useful = len(account.answers[request].token_ids)
        account.log(f"slot {slot}: req {request} finished: {num_useful}/{num_steps} tokens useful")


def left_pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts as a left-padded rectangle `[B, longest]` int64, and its mask: 1 for tokens, 0 for padding."""
    width = max(map(len, prompts))
    rows = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(rows, device=device), torch.tensor(mask, device=device)
