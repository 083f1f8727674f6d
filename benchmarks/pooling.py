"""Embeddings of ragged texts: inflight beside sentence-transformers, infinity-emb, OpenVINO and ONNX Runtime.

python benchmarks/pooling.py --shape bert-base --dtype float32
python benchmarks/pooling.py --shape qwen3-0.6b --dtype bfloat16 --texts 128 --rounds 3

Each makes the vectors of the same texts from the same checkpoint (random weights, one token for each word) and on the
same number of threads. Rounds alternate, so that whatever disturbs the machine disturbs all; medians are compared, and
the vectors. Contenders that are not installed are left out, and said to be: `pip install sentence-transformers
infinity-emb openvino onnxruntime onnx`. OpenVINO and ONNX Runtime (which fastembed runs) have no embedding pipeline of
their own here: they get batches of 32, sorted by length and padded, as sentence-transformers does it. What is compared
includes tokenizing and pooling.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, it finds only its own folder

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel

from benchmarks.compare import describe_machine
from inflight import LLM
from tests.pooling.checkpoints import SPECIAL, make_tokenizer, write_modules

SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert-base": ("bert", "mean", {}),
    "qwen3-0.6b": (
        "qwen3",
        "lasttoken",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 32768,
        },
    ),
}
"""The published shapes: model type, pooling, sizes. Vocabularies are small, which only the embedding table sees."""
VOCAB_SIZE = 256
SHORTEST, LONGEST = 16, 512
BATCH_SIZE = 32
"""Of those that pad; the default of sentence-transformers and infinity-emb."""

Vectors: TypeAlias = npt.NDArray[np.float32]
Contender: TypeAlias = Callable[[Sequence[str]], Vectors]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="bert-base")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("; ".join(f"{name}: {value}" for name, value in describe_machine().items()))
    texts, num_tokens = ragged_texts(options.texts)
    print(f"{options.shape}, {options.dtype}, {options.threads} threads, {len(texts)} texts of {num_tokens} tokens")
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(options.shape, Path(folder))
        contenders = dict(available(folder, options.shape, options.dtype, options.threads))
        compare(contenders, texts, num_tokens, options.rounds)


def ragged_texts(number: int) -> tuple[list[str], int]:
    """Texts of lognormal lengths, half of them below 100 words, and how many tokens they have with special ones."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(100), 0.8, number).astype(int), SHORTEST, LONGEST - 2)
    texts = [" ".join(f"w{word}" for word in random.integers(len(SPECIAL), VOCAB_SIZE, length)) for length in lengths]
    return texts, int(lengths.sum()) + 2 * number


def make_checkpoint(shape: str, folder: Path) -> None:
    """A folder as sentence-transformers has it."""
    model_type, mode, sizes = SHAPES[shape]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{"vocab_size": VOCAB_SIZE, "pad_token_id": 0, **sizes})
    AutoModel.from_config(config).save_pretrained(folder)
    make_tokenizer(model_type).save_pretrained(folder)
    write_modules(folder, pooling={"pooling_mode": mode}, own={"max_seq_length": LONGEST, "do_lower_case": False})


# ------------------------------------------------------------------------------------------ contenders


def available(folder: str, shape: str, dtype: str, num_threads: int) -> Iterator[tuple[str, Contender]]:
    """The contenders that run here, by name."""
    makers: dict[str, Callable[[str, str, str, int], Contender]] = {
        "inflight": inflight,
        "sentence-transformers": sentence_transformers,
        "infinity-emb": infinity,
        "OpenVINO": open_vino,
        "ONNX Runtime": onnx_runtime,
    }
    for name, make in makers.items():
        try:
            yield name, make(folder, shape, dtype, num_threads)
        except Exception as error:
            print(f"{name} is left out: {type(error).__name__}: {str(error).splitlines()[0][:120]}")


def inflight(folder: str, shape: str, dtype: str, num_threads: int) -> Contender:
    """This engine."""
    llm = LLM(folder, dtype=dtype, num_threads=num_threads)
    return lambda texts: np.stack([np.asarray(output.embedding) for output in llm.embed(texts)])


def sentence_transformers(folder: str, shape: str, dtype: str, num_threads: int) -> Contender:
    """`SentenceTransformer.encode`."""
    from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]

    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    return lambda texts: np.asarray(model.encode(list(texts), batch_size=BATCH_SIZE), dtype=np.float32)


def infinity(folder: str, shape: str, dtype: str, num_threads: int) -> Contender:
    """infinity-emb's engine, with torch."""
    from infinity_emb import AsyncEmbeddingEngine, EngineArgs  # type: ignore[import-not-found]

    options = {"bettertransformer": False, "model_warmup": False, "batch_size": BATCH_SIZE}
    arguments = EngineArgs(model_name_or_path=folder, engine="torch", device="cpu", dtype=dtype, **options)
    engine = AsyncEmbeddingEngine.from_args(arguments)

    async def embed(texts: Sequence[str]) -> Vectors:
        async with engine:
            vectors, _ = await engine.embed(sentences=list(texts))
        return np.stack(vectors).astype(np.float32)

    return lambda texts: asyncio.run(embed(texts))


class _States(torch.nn.Module):
    """A model as a function of tensors, for those that trace it."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False
        ).last_hidden_state
        return states


def open_vino(folder: str, shape: str, dtype: str, num_threads: int) -> Contender:
    """OpenVINO, which converts the model."""
    import openvino  # type: ignore[import-not-found]

    example = torch.ones(2, 8, dtype=torch.long)
    inputs = {"input_ids": example, "attention_mask": example}
    converted = openvino.convert_model(_States(AutoModel.from_pretrained(folder).eval()), example_input=inputs)
    hints = {
        "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[dtype],
        "INFERENCE_NUM_THREADS": num_threads,
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled = openvino.Core().compile_model(converted, "CPU", hints)
    return padded(folder, shape, lambda ids, mask: compiled({"input_ids": ids, "attention_mask": mask})[0])


def onnx_runtime(folder: str, shape: str, dtype: str, num_threads: int) -> Contender:
    """ONNX Runtime, which fastembed runs; float32 only."""
    import onnxruntime  # type: ignore[import-not-found]

    if dtype != "float32":
        raise ValueError("its CPU kernels have no bfloat16")
    example, path = torch.ones(2, 8, dtype=torch.long), str(Path(folder) / "model.onnx")
    axes = {"input_ids": {0: "texts", 1: "tokens"}, "attention_mask": {0: "texts", 1: "tokens"}}
    torch.onnx.export(
        _States(AutoModel.from_pretrained(folder).eval()),
        (example, example),
        path,
        input_names=list(axes),
        output_names=["states"],
        dynamic_axes=axes,
        dynamo=False,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return padded(
        folder, shape, lambda ids, mask: session.run(["states"], {"input_ids": ids, "attention_mask": mask})[0]
    )


def padded(folder: str, shape: str, states_of: Callable[[Any, Any], Any]) -> Contender:
    """Batches of texts of about equal length, padded; pooled and normalised."""
    tokenizer, mode = AutoTokenizer.from_pretrained(folder), SHAPES[shape][1]

    def embed(texts: Sequence[str]) -> Vectors:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        vectors: list[Any] = [None] * len(texts)
        for first in range(0, len(order), BATCH_SIZE):
            members = order[first : first + BATCH_SIZE]
            read = tokenizer([texts[index] for index in members], padding=True, return_tensors="np")
            mask = read["attention_mask"]
            states = states_of(read["input_ids"], mask)
            if mode == "mean":
                pooled = (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            else:
                pooled = states[np.arange(len(members)), mask.sum(1) - 1]
            for index, vector in zip(members, pooled, strict=True):
                vectors[index] = vector / np.linalg.norm(vector)
        return np.stack(vectors)

    return embed


# ------------------------------------------------------------------------------------------ measuring


def compare(contenders: dict[str, Contender], texts: Sequence[str], num_tokens: int, num_rounds: int) -> None:
    """Run all in turn, and print what each took and how far its vectors are from the first one's."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    vectors: dict[str, Vectors] = {}
    for embed in contenders.values():
        embed(texts[:BATCH_SIZE])
    for _ in range(num_rounds):
        for name, embed in contenders.items():
            start = time.perf_counter()
            vectors[name] = embed(texts)
            seconds[name].append(time.perf_counter() - start)
    first, *_ = contenders
    ours = statistics.median(seconds[first])
    for name, measured in seconds.items():
        median = statistics.median(measured)
        error = np.linalg.norm(vectors[name] - vectors[first], axis=1).max()
        print(
            f"{name:22} {median:7.2f} s ({min(measured):.2f} to {max(measured):.2f}), {num_tokens / median:6.0f} "
            f"tokens a second; {first} takes 1/{median / ours:.2f} of it; vectors differ by {error:.1e}"
        )


if __name__ == "__main__":
    main()
