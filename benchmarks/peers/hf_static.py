"""Runner: `transformers`' `model.generate` over static waves, left-padded, each as long as its longest request.

This is what a user of plain `transformers` would write. A request's first token counts from when its wave generated it,
as if it were streamed; its end is when the wave returns, because `generate` returns nothing earlier. Only requested
tokens are counted.
"""

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.protocol import Model, Settings, Times, serve
from benchmarks.workloads import Request


class StaticModel:
    def __init__(self, settings: Settings) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(settings.num_threads)
        self.options: dict[str, Any] = {"dtype": settings.dtype, "attn_implementation": "sdpa"}
        dtype = getattr(torch, settings.dtype)
        self._num_slots = settings.num_slots
        self._model: Any = (
            AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype, attn_implementation="sdpa")
            .eval()
            .to(settings.device)
        )
        self._device = settings.device

    def generate(self, requests: Sequence[Request]) -> list[Times]:
        times: list[Times] = []
        for first in range(0, len(requests), self._num_slots):
            times += self._run_wave(requests[first : first + self._num_slots])
        return times

    def _run_wave(self, wave: Sequence[Request]) -> list[Times]:
        import torch
        from transformers import GenerationConfig, StoppingCriteriaList

        first_token_times: list[float] = []

        def note_first_token(input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            """A stopping criterion that stops nothing: it is called after every token."""
            if not first_token_times:
                first_token_times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        longest_prompt = max(len(request.prompt) for request in wave)
        longest_output = max(request.num_output_tokens for request in wave)
        padding = [longest_prompt - len(request.prompt) for request in wave]
        output = self._model.generate(
            torch.tensor(
                [[0] * pad + request.prompt for pad, request in zip(padding, wave, strict=True)], device=self._device
            ),
            attention_mask=torch.tensor(
                [[0] * pad + [1] * (longest_prompt - pad) for pad in padding], device=self._device
            ),
            generation_config=GenerationConfig(
                max_new_tokens=longest_output, do_sample=False, pad_token_id=0, eos_token_id=None
            ),
            stopping_criteria=StoppingCriteriaList([note_first_token]),
        )
        end, num_made = time.perf_counter(), output.shape[1] - longest_prompt
        return [Times(min(num_made, request.num_output_tokens), first_token_times[0], end) for request in wave]


def load(settings: Settings) -> Model:
    return StaticModel(settings)


if __name__ == "__main__":
    serve(
        load,
        modules=("torch", "transformers.modeling_utils", "transformers.generation.utils"),
        distributions=("torch", "transformers"),
    )
