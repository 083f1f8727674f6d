"""Runner: mistral.rs through its Python package, rounding weights itself ("in situ") or reading llama.cpp's file.

It takes texts, not token ids, so each id becomes a letter, which the stand-in tokenizer (`models.py`) reads back as one
token; a prompt of another length ends the run.
"""

import json
import os
import string
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Model, RunnerError, Settings, Times, serve
from benchmarks.workloads import Request

ROUNDED_TO = {"int8": "Q8_0", "int4": "Q4K"}
DTYPES = {"float32": "F32", "bfloat16": "BF16"}


class MistralRs:
    def __init__(self, settings: Settings) -> None:
        from mistralrs import ModelDType, Runner, Which  # type: ignore[import-not-found]

        dtype = getattr(ModelDType, DTYPES[settings.dtype])
        model = Path(settings.model)
        self.options: dict[str, Any] = {"max_seqs": settings.num_slots}
        if model.suffix == ".gguf":
            which = Which.GGUF(str(model.parent), model.name, dtype=dtype)
        else:
            self.options["in_situ_quant"] = ROUNDED_TO[settings.quantization or ""]
            self._folder = tempfile.TemporaryDirectory()
            which = Which.Plain(str(_with_old_config(model, Path(self._folder.name))), dtype=dtype)
        self._runner = Runner(which, **self.options)

    def generate(self, requests: Sequence[Request]) -> list[Times]:
        if len(requests) > 1:
            raise RunnerError("with quantized weights on a CPU, mistral.rs fails on prompts that run together")
        return [self._ask(request) for request in requests]

    def _ask(self, request: Request) -> Times:
        from mistralrs import CompletionRequest

        answer = self._runner.send_completion_request(
            CompletionRequest(
                prompt=_text(request.prompt),
                model="default",
                max_tokens=request.num_output_tokens,
                temperature=0.0,
                top_k=1,
                ignore_eos=True,
            )
        )
        end = time.perf_counter()
        usage = answer.usage
        if usage.prompt_tokens != len(request.prompt):
            raise RunnerError(f"a prompt of {len(request.prompt)} tokens became one of {usage.prompt_tokens}")
        return Times(usage.completion_tokens, end - usage.total_completion_time_sec, end)


def _text(token_ids: Sequence[int]) -> str:
    return "".join(string.ascii_letters[token_id % len(string.ascii_letters)] for token_id in token_ids)


def _with_old_config(model: Path, folder: Path) -> Path:
    """Link the checkpoint's files into `folder`, with a config as `transformers` 4 wrote it, which mistral.rs reads."""
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    config |= {"torch_dtype": config.get("dtype"), **config.get("rope_parameters", {})}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(settings: Settings) -> Model:
    os.environ["RAYON_NUM_THREADS"] = str(settings.num_threads)
    os.environ["HF_HUB_OFFLINE"] = "1"
    return MistralRs(settings)


if __name__ == "__main__":
    serve(load, modules=("mistralrs",), distributions=("mistralrs",))
