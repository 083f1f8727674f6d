"""Runner: OpenVINO GenAI's `ContinuousBatchingPipeline` on an exported model (IR).

`max_num_seqs` is not enforced under dynamic split-fuse: requests beyond the slots wait here, outside the pipeline.
"""

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.protocol import Model, Settings, Times, serve
from benchmarks.workloads import Request

CACHE_GIGABYTES = 2
PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


class Pipeline:
    def __init__(self, settings: Settings) -> None:
        import openvino_genai  # type: ignore[import-not-found]

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GIGABYTES
        scheduler.max_num_batched_tokens = settings.max_batch_tokens
        scheduler.max_num_seqs = settings.num_slots
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        properties = {
            "INFERENCE_NUM_THREADS": settings.num_threads,
            "INFERENCE_PRECISION_HINT": PRECISIONS[settings.dtype],
        }
        self.options: dict[str, Any] = {
            **properties,
            "cache_size": CACHE_GIGABYTES,
            "max_num_batched_tokens": settings.max_batch_tokens,
            "dynamic_split_fuse": True,
            "enable_prefix_caching": True,
            "requests in flight": settings.num_slots,
            "model": settings.model.rpartition("/")[2],
        }
        self._num_slots = settings.num_slots
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(settings.model, scheduler, "CPU", properties)
        self._num_requests = 0

    def generate(self, requests: Sequence[Request]) -> list[Times]:
        waiting, running = deque(range(len(requests))), dict[int, Any]()
        counts, first, last = [0] * len(requests), [0.0] * len(requests), [0.0] * len(requests)
        while waiting or running:
            while waiting and len(running) < self._num_slots:
                number = waiting.popleft()
                running[number] = self._submit(requests[number])
            self._pipeline.step()
            now = time.perf_counter()
            for number, handle in list(running.items()):
                while handle.can_read():
                    counts[number] += sum(len(output.generated_ids) for output in handle.read().values())
                    first[number] = first[number] or now
                    last[number] = now
                if counts[number] >= requests[number].num_output_tokens:
                    del running[number]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return [Times(*each) for each in zip(counts, first, last, strict=True)]

    def _submit(self, request: Request) -> Any:
        import numpy
        import openvino  # type: ignore[import-not-found]
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = request.num_output_tokens
        config.do_sample = False
        config.ignore_eos = True
        self._num_requests += 1
        prompt = openvino.Tensor(numpy.array([request.prompt], dtype=numpy.int64))
        return self._pipeline.add_request(self._num_requests, prompt, config)


def load(settings: Settings) -> Model:
    return Pipeline(settings)


if __name__ == "__main__":
    serve(
        load,
        modules=("openvino", "openvino_genai"),
        distributions=("openvino-genai", "openvino", "optimum-intel", "nncf"),
    )
