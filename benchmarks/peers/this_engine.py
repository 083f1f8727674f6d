"""Runner: inflight itself, driven step by step as `LLM.generate` drives it.

The file is not called inflight.py, because as a script it would hide the package.
"""

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Model, RunnerError, Settings, Times, serve
from benchmarks.workloads import Request


class InflightModel:
    """`inflight.LLM` without its progress bar and texts."""

    def __init__(self, settings: Settings) -> None:
        import torch

        from inflight import LLM

        torch.set_num_threads(settings.num_threads)
        self.options: dict[str, Any] = {
            "dtype": settings.dtype,
            "max_num_seqs": settings.num_slots,
            "max_num_batched_tokens": settings.max_batch_tokens,
            "speculation": {None: "off", "ngram": "lookup", "draft": "draft"}[settings.speculation],
        }
        if settings.quantization is not None and not settings.model.endswith(".gguf"):
            self.options["quantization"] = settings.quantization
        self._engine = LLM(
            settings.model, device=settings.device, draft_model=settings.draft_model, **self.options
        ).engine
        if settings.draft_model is not None:
            self.options["draft_model"] = Path(settings.draft_model).name
        if settings.acceptance is not None:
            accept_by_chance(self._engine.runner.sampler, settings.acceptance)

    def generate(self, requests: Sequence[Request]) -> list[Times]:
        from inflight import SamplingParams

        engine = self._engine
        counts, first, last = [0] * len(requests), [0.0] * len(requests), [0.0] * len(requests)
        for number, request in enumerate(requests):
            params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=request.num_output_tokens)
            engine.submit(engine.inputs.accept(str(number), request.prompt, params))
        while engine.has_unfinished_requests:
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                if output.error:
                    raise RunnerError(output.error)
                number = int(output.request_id)
                first[number] = first[number] or now
                counts[number] += len(output.new_token_ids)
                last[number] = now
        return [Times(*each) for each in zip(counts, first, last, strict=True)]


def accept_by_chance(sampler: Any, acceptance: float) -> None:
    """From now on the sampler says that a draft token is right as often as that, whatever the logits are."""
    rng, sample = random.Random(0), sampler.sample

    def accepting(logits: Any, batch: Any, masks: Any = None) -> list[int]:
        tokens: list[int] = sample(logits, batch, masks)
        row = 0
        for span in batch.spans:
            for number, proposed in enumerate(span.draft_token_ids, row):
                tokens[number] = proposed if rng.random() < acceptance else proposed + 1
            row += span.num_logit_rows
        return tokens

    sampler.sample = accepting


def load(settings: Settings) -> Model:
    return InflightModel(settings)


if __name__ == "__main__":
    serve(
        load,
        modules=("torch", "transformers.modeling_utils", "transformers.generation.utils", "inflight"),
        distributions=("inflight-llm", "torch", "transformers"),
    )
