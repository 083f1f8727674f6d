"""Runner: `transformers`' own continuous batching, with paged sdpa (its best on a CPU) and its prefix sharing.

The cache is as large as all slots need at most, plus the same amount for prefixes that it may keep.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.peers.protocol import Model, RunnerError, Settings, Times, serve
from benchmarks.workloads import Request

PAGE_SIZE = 32


class ContinuousModel:
    """One manager for the whole life of the runner; its thread waits while there is nothing to do."""

    def __init__(self, settings: Settings) -> None:
        import torch
        from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

        torch.set_num_threads(settings.num_threads)
        pages_per_request = -(-settings.max_model_len // PAGE_SIZE) + 1
        self.options: dict[str, Any] = {
            "page_size": PAGE_SIZE,
            "num_blocks": 2 * settings.num_slots * pages_per_request,
            "max_batch_tokens": settings.max_batch_tokens,
            "max_requests_per_batch": settings.num_slots,
            "use_cuda_graph": False,
            "use_async_batching": False,
        }
        dtype = getattr(torch, settings.dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype, attn_implementation="sdpa")
        self._manager = (
            model.eval()
            .to(settings.device)
            .init_continuous_batching(
                generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
                continuous_batching_config=ContinuousBatchingConfig(**self.options),
            )
        )
        self.options |= {"dtype": settings.dtype, "attn_implementation": "sdpa"}
        self._manager.start()
        self._num_runs = 0

    def generate(self, requests: Sequence[Request]) -> list[Times]:
        self._num_runs += 1
        names = [f"{self._num_runs}-{number}" for number in range(len(requests))]
        for name, request in zip(names, requests, strict=True):
            self._manager.add_request(
                request.prompt,
                request_id=name,
                max_new_tokens=request.num_output_tokens,
                eos_token_id=-1,
                record_timestamps=True,
            )
        times: dict[str, Times] = {}
        for output in self._manager:
            if output.error:
                raise RunnerError(output.error)
            stamps = output.timestamps
            times[output.request_id] = Times(len(output.generated_tokens), stamps[0], stamps[-1])
            if len(times) == len(requests):
                break
        if missing := [name for name in names if name not in times]:
            raise RunnerError(f"{len(missing)} requests were never finished: the manager's thread has ended")
        return [times[name] for name in names]


def load(settings: Settings) -> Model:
    return ContinuousModel(settings)


if __name__ == "__main__":
    serve(
        load,
        modules=("torch", "transformers.modeling_utils", "transformers.generation.utils"),
        distributions=("torch", "transformers"),
    )
