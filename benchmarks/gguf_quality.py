"""What the arithmetics of weights in groups cost: a GGUF file on a text, compared with its dequantised model.

python -m benchmarks.gguf_quality model-Q4_K_M.gguf --text docs/how-it-works.md --llama-cpp-python PATH_OF_A_PYTHON

For all next tokens of the text, in pieces: perplexity, the mean Kullback-Leibler divergence of the distribution from
that of `transformers` with dequantised weights in float32, and how often the most likely token is the same. llama.cpp
takes part if a Python is named that has `llama-cpp-python`.
"""

import argparse
import subprocess
import tempfile
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.step.plan import Span, StepPlan
from inflight.execution.model_runner import ModelRunner
from inflight.execution.ragged_batch import RaggedBatch
from inflight.text.tokenizer_files import read_tokenizer

PIECE = 512
ENGINES = {
    "inflight, exact, float32": {"dtype": "float32", "quantization_arithmetic": "exact"},
    "inflight, exact, bfloat16": {"dtype": "bfloat16", "quantization_arithmetic": "exact"},
    "inflight, fast, float32": {"dtype": "float32", "quantization_arithmetic": "fast"},
    "inflight, fast, bfloat16": {"dtype": "bfloat16", "quantization_arithmetic": "fast"},
}
LLAMACPP = """
import sys
import numpy as np
from llama_cpp import Llama

model, pieces, target = sys.argv[1:]
pieces = np.load(pieces)
llama = Llama(model, n_ctx=pieces.shape[1], logits_all=True, verbose=False, n_threads=2, n_threads_batch=2)
logits = []
for piece in pieces:
    llama.reset()
    llama.eval(piece.tolist())
    logits.append(llama.scores[: len(piece)].copy())
np.save(target, np.stack(logits))
"""


@dataclass
class Score:
    """Sums over tokens."""

    loss: float = 0.0
    divergence: float = 0.0
    num_agreeing: int = 0
    num_tokens: int = 0

    def add(self, piece: list[int], logits: torch.Tensor, plain: torch.Tensor) -> None:
        """Add a piece; `logits` and `plain` are `[tokens, V]`."""
        ours, exact = logits[:-1].log_softmax(-1), plain[:-1].log_softmax(-1)
        self.loss -= float(ours.gather(1, torch.tensor(piece[1:])[:, None]).sum())
        self.divergence += float((exact.exp() * (exact - ours)).sum())
        self.num_agreeing += int((ours.argmax(-1) == exact.argmax(-1)).sum())
        self.num_tokens += len(piece) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--pieces", type=int, default=12, help=f"of {PIECE} tokens")
    parser.add_argument("--llama-cpp-python", type=Path)
    options = parser.parse_args()
    pieces = read_pieces(options.model, options.text, options.pieces)
    plain = run_plain(options.model, pieces)
    print("| | perplexity | KL from dequantised float32 | top-1 agrees |")
    print("|---|---|---|---|")
    report("transformers, dequantised, float32", pieces, plain, plain)
    for name, engine_options in ENGINES.items():
        report(name, pieces, run_engine(options.model, pieces, engine_options), plain)
    if options.llama_cpp_python:
        report("llama.cpp", pieces, run_llamacpp(options.llama_cpp_python, options.model, pieces), plain)
    print(f"\n{len(pieces)} pieces of {PIECE} tokens")


def read_pieces(model: Path, text: Path, number: int) -> list[list[int]]:
    """The text in pieces of tokens, each with the token that begins a text."""
    tokenizer = read_tokenizer(str(model))
    assert tokenizer is not None
    first, *tokens = tokenizer.encode(text.read_text())
    size = PIECE - 1
    return [[first, *tokens[i : i + size]] for i in range(0, len(tokens) - size, size)][:number]


def report(name: str, pieces: list[list[int]], logits: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
    """Print a line of the table."""
    score = Score()
    for each in zip(pieces, logits, plain, strict=True):
        score.add(*each)
    n = score.num_tokens
    perplexity = float(torch.tensor(score.loss / n).exp())
    print(f"| {name} | {perplexity:.4f} | {score.divergence / n:.2e} | {score.num_agreeing / n:.2%} |", flush=True)


@torch.inference_mode()
def run_plain(model: Path, pieces: list[list[int]]) -> list[torch.Tensor]:
    """Logits `[tokens, V]` of each piece, by `transformers` alone."""
    plain = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32).eval()
    return [plain(torch.tensor([piece])).logits[0].float() for piece in pieces]


def run_engine(model: Path, pieces: list[list[int]], options: dict[str, str]) -> list[torch.Tensor]:
    """The same by the engine's executor."""
    runner = ModelRunner(str(model), EngineConfig(num_blocks=8 * PIECE // 16, **options))
    size = PIECE // 16
    tables = tuple((array("i", range(g * size, (g + 1) * size)),) for g in range(len(runner.executor.cache_groups)))

    def run(piece: list[int]) -> torch.Tensor:
        plan = StepPlan((Span(0, 0, 0, piece, len(piece), len(piece)),), tables)
        batch = RaggedBatch.from_plan(plan, runner.config.kv_cache.block_size, runner.device)
        return runner.executor.forward(batch).float()

    return list(map(run, pieces))


def run_llamacpp(python: Path, model: Path, pieces: list[list[int]]) -> list[torch.Tensor]:
    """The same by llama.cpp, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        given, target = Path(folder, "pieces.npy"), Path(folder, "logits.npy")
        np.save(given, np.array(pieces))
        subprocess.run([python, "-c", LLAMACPP, model, given, target], check=True)
        return [torch.from_numpy(each).float() for each in np.load(target)]


if __name__ == "__main__":
    main()
