"""Runner: CTranslate2's `Generator`, which batches statically: waves of `num_slots` requests, in order.

A callback ends each request when it has its tokens, and CTranslate2 continues with a smaller batch; a common prefix of
all prompts is passed as its cached "static prompt". That is the best it offers for requests of different lengths.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Model, Settings, Times, serve
from benchmarks.workloads import Request

COMPUTE_TYPES = {
    ("float32", None): "float32",
    ("float32", "int8"): "int8_float32",
    ("bfloat16", "int8"): "int8_float32",
}
MIN_PREFIX_TOKENS = 32


class Generator:
    def __init__(self, settings: Settings) -> None:
        import ctranslate2  # type: ignore[import-not-found]

        self.options: dict[str, Any] = {
            "compute_type": COMPUTE_TYPES[settings.dtype, settings.quantization],
            "inter_threads": 1,
            "intra_threads": settings.num_threads,
        }
        self._num_slots = settings.num_slots
        self._vocabulary: list[str] = json.loads(Path(settings.model, "vocabulary.json").read_text())
        self._generator = ctranslate2.Generator(settings.model, device="cpu", **self.options)

    def generate(self, requests: Sequence[Request]) -> list[Times]:
        prefix = common_prefix([request.prompt for request in requests])
        if len(prefix) < MIN_PREFIX_TOKENS:
            prefix = []
        times: list[Times] = []
        for first in range(0, len(requests), self._num_slots):
            times += self._run_wave(requests[first : first + self._num_slots], prefix)
        return times

    def _run_wave(self, wave: Sequence[Request], prefix: list[int]) -> list[Times]:
        counts, first, last = [0] * len(wave), [0.0] * len(wave), [0.0] * len(wave)

        def note(step: Any) -> bool:
            """Called for every token; true ends the request."""
            now = time.perf_counter()
            number: int = step.batch_id
            if counts[number] < wave[number].num_output_tokens:
                counts[number] += 1
                first[number] = first[number] or now
                last[number] = now
            return counts[number] >= wave[number].num_output_tokens

        self._generator.generate_batch(
            [self._names(request.prompt[len(prefix) :]) for request in wave],
            static_prompt=self._names(prefix) if prefix else None,
            max_length=max(request.num_output_tokens for request in wave),
            include_prompt_in_result=False,
            sampling_topk=1,
            end_token=[],
            callback=note,
        )
        return [Times(*each) for each in zip(counts, first, last, strict=True)]

    def _names(self, token_ids: Sequence[int]) -> list[str]:
        """CTranslate2 takes tokens by their names."""
        return [self._vocabulary[token_id] for token_id in token_ids]


def common_prefix(prompts: Sequence[list[int]]) -> list[int]:
    """The tokens that all prompts begin with."""
    prefix = []
    for tokens in zip(*prompts, strict=False):
        if len(set(tokens)) > 1:
            break
        prefix.append(tokens[0])
    return prefix


def load(settings: Settings) -> Model:
    return Generator(settings)


if __name__ == "__main__":
    serve(load, modules=("ctranslate2",), distributions=("ctranslate2", "transformers"))
