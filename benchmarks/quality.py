"""What low precision costs: the embedded model on held-out text, compared with plain float32 and plain bfloat16.

python -m benchmarks.quality

For all next tokens of held-out documents: perplexity, the mean Kullback-Leibler divergence of the distribution from the
plain model's in float32 and in bfloat16, and how often the most likely token is the plain bfloat16 model's. "Plain"
means `transformers` alone; the other variants run through the engine's executor, in chunks like those of a step.
"""

import argparse
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.step.plan import Span, StepPlan
from inflight.demo_model import DEMO_MODEL
from inflight.execution.model_runner import ModelRunner
from inflight.execution.ragged_batch import RaggedBatch
from tools.train_demo_model import write_documents

HELD_OUT_SEED = 987_654
CHUNK = 64
MAX_LENGTH = 256
INT4 = {"dtype": "bfloat16", "quantization": "int4"}
ENGINES: dict[str, dict[str, Any]] = {
    "engine, float32": {"dtype": "float32"},
    "engine, bfloat16": {"dtype": "bfloat16"},
    "engine, bfloat16, int8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "engine, bfloat16, int4 cache": {"dtype": "bfloat16", "kv_cache_dtype": "int4"},
    "engine, int8 weights": {"dtype": "bfloat16", "quantization": "int8"},
    "engine, int4 weights": INT4,
    "engine, int4 weights, exact": INT4 | {"quantization_arithmetic": "exact"},
    "engine, int4 weights, groups of 64": INT4 | {"quantization_group_size": 64},
    "engine, int4 weights, groups of 128": INT4 | {"quantization_group_size": 128},
    "engine, int4 weights, minima": INT4 | {"quantization_minima": True},
    "engine, int4 weights, minima, groups of 64": INT4 | {"quantization_minima": True, "quantization_group_size": 64},
    "engine, int8 weights and cache": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
}


@dataclass
class Score:
    """Sums over tokens."""

    loss: float = 0.0
    divergence_from_float32: float = 0.0
    divergence_from_bfloat16: float = 0.0
    num_agreeing: int = 0
    num_tokens: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=200)
    documents = held_out(parser.parse_args().documents)
    ways = {"plain, float32": plain("float32"), "plain, bfloat16": plain("bfloat16")}
    ways |= {name: through_engine(options) for name, options in ENGINES.items()}
    scores = {name: Score() for name in ways}
    for document in documents:
        logits = {name: way(document) for name, way in ways.items()}
        for name, score in scores.items():
            add(score, document, logits[name], logits["plain, float32"], logits["plain, bfloat16"])
    print("| | perplexity | KL from plain float32 | KL from plain bfloat16 | top-1 as plain bfloat16 |")
    print("|---|---|---|---|---|")
    for name, score in scores.items():
        n = score.num_tokens
        perplexity = torch.tensor(score.loss / n).exp()
        print(
            f"| {name} | {perplexity:.4f} | {score.divergence_from_float32 / n:.2e} | "
            f"{score.divergence_from_bfloat16 / n:.2e} | {score.num_agreeing / n:.2%} |"
        )
    print(f"\n{len(documents)} documents, {scores['plain, float32'].num_tokens} tokens")


def held_out(count: int) -> list[list[int]]:
    """Return documents that the model was not trained on, as tokens."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    texts = write_documents(HELD_OUT_SEED, count, 0.0)
    return [tokenizer(text)["input_ids"][:MAX_LENGTH] for text in texts]


def plain(dtype: str) -> Callable[[list[int]], torch.Tensor]:
    """Return a function from a document to its logits `[tokens, V]`, computed by `transformers` alone."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def run(document: list[int]) -> torch.Tensor:
        logits: torch.Tensor = model(torch.tensor([document])).logits[0].float()
        return logits

    return run


def through_engine(options: dict[str, Any]) -> Callable[[list[int]], torch.Tensor]:
    """Return a function from a document to its logits `[tokens, V]`, computed by the engine's executor."""
    runner = ModelRunner(str(DEMO_MODEL), EngineConfig(num_blocks=64, **options))

    def chunks(document: list[int]) -> Iterator[torch.Tensor]:
        for first in range(0, len(document), CHUNK):
            tokens = document[first : first + CHUNK]
            plan = StepPlan((Span(0, 0, first, tokens, len(tokens), len(document)),), ((array("i", range(64)),),))
            yield runner.executor.forward(
                RaggedBatch.from_plan(plan, runner.config.kv_cache.block_size, runner.device)
            ).float()

    return lambda document: torch.cat(list(chunks(document)))


def add(score: Score, document: list[int], logits: torch.Tensor, float32: torch.Tensor, bfloat16: torch.Tensor) -> None:
    """Add one document to the score; `logits`, `float32` and `bfloat16` are `[tokens, V]`."""
    targets = torch.tensor(document[1:])
    ours, exact, rounded = (each[:-1].log_softmax(-1) for each in (logits, float32, bfloat16))
    score.loss -= float(ours.gather(1, targets[:, None]).sum())
    score.divergence_from_float32 += float((exact.exp() * (exact - ours)).sum())
    score.divergence_from_bfloat16 += float((rounded.exp() * (rounded - ours)).sum())
    score.num_agreeing += int((ours.argmax(-1) == rounded.argmax(-1)).sum())
    score.num_tokens += len(targets)


if __name__ == "__main__":
    main()
