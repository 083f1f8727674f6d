"""Runner: vLLM's CPU build, compiled (its default), with prefix caching, bound to the cores that it may use.

As its installation guide recommends, Intel's OpenMP (which comes with it) is preloaded, and tcmalloc if it is present.
By default vLLM would keep one core free for its scheduler, which is half of a machine with two cores.
"""

import ctypes.util
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Model, Settings, Times, serve
from benchmarks.workloads import Request

CACHE_GIBIBYTES = 2
NUM_DRAFT_TOKENS = 8


class Vllm:
    def __init__(self, settings: Settings) -> None:
        cores = sorted(os.sched_getaffinity(0))[: settings.num_threads]
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIBIBYTES),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        os.environ.update(environment)
        from vllm import LLM  # type: ignore[import-not-found]

        self.options: dict[str, Any] = {
            "dtype": settings.dtype,
            "max_num_seqs": settings.num_slots,
            "max_model_len": settings.max_model_len,
            "enable_prefix_caching": True,
            "load_format": "auto" if any(Path(settings.model).glob("*.safetensors")) else "dummy",
        }
        if settings.speculation == "ngram":
            self.options["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": NUM_DRAFT_TOKENS,
                "prompt_lookup_min": 2,
                "prompt_lookup_max": 4,
            }
        self._engine = LLM(settings.model, skip_tokenizer_init=True, **self.options).llm_engine
        self.options |= environment | {"LD_PRELOAD": [Path(each).name for each in preloaded()]}
        self._num_runs = 0

    def generate(self, requests: Sequence[Request]) -> list[Times]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

        self._num_runs += 1
        counts, first, last = [0] * len(requests), [0.0] * len(requests), [0.0] * len(requests)
        for number, request in enumerate(requests):
            params = SamplingParams(
                temperature=0,
                ignore_eos=True,
                max_tokens=request.num_output_tokens,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            prompt = {"prompt_token_ids": request.prompt}
            self._engine.add_request(f"{self._num_runs}-{number}", prompt, params)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                number = int(output.request_id.partition("-")[2])
                first[number] = first[number] or now
                counts[number] += len(output.outputs[0].token_ids)
                last[number] = now
        return [Times(*each) for each in zip(counts, first, last, strict=True)]


def preloaded() -> list[str]:
    """Return the libraries to preload: those of vLLM's guide that are installed."""
    openmp = Path(sys.prefix, "lib", "libiomp5.so")
    allocator = ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")
    return [*([allocator] if allocator else []), *([str(openmp)] if openmp.exists() else [])]


def load(settings: Settings) -> Model:
    return Vllm(settings)


if __name__ == "__main__":
    if preloaded() and "LD_PRELOAD" not in os.environ:
        os.environ["LD_PRELOAD"] = ":".join(preloaded())
        os.execv(sys.executable, sys.orig_argv)  # a library can be preloaded only at the start of a process
    serve(load, modules=("torch", "vllm"), distributions=("vllm-cpu", "torch", "transformers"))
