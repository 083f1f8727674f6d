"""Prompts with one image each: inflight beside `transformers`, one by one and in padded batches.

python -m benchmarks.images --pages 64 --rounds 3 [--shape qwen2.5-vl-3b] [--dtype bfloat16] [--llamacpp]
python -m benchmarks.images --questions 10
python -m benchmarks.images --beside 20
python -m benchmarks.images --text

SmolVLM-256M's shape (the class Idefics3), or Qwen2.5-VL-3B's, with random weights and a vocabulary of bytes; images of
random pixels, 448 x 448, of 64 or 256 tokens; a question of 24 letters, and an answer of 32 tokens. Rounds alternate,
and medians are compared. `--llamacpp`: beside llama.cpp's server with an mmproj file, eight slots (`compare.py
--install llamacpp` builds it). `--questions`: the time to the first token of each question about one image, the first
of which pays for the image. `--beside`: the time between tokens of four streams of text, alone and while a prompt with
four images arrives every N seconds. `--text`: the speed of texts beside that of the language model's own class.
"""

import argparse
import asyncio
import atexit
import base64
import copy
import http.client
import io
import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLVideoProcessor,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks.compare import describe_machine
from benchmarks.peers.catalogue import PEERS
from benchmarks.peers.install import llamacpp_sources
from inflight import LLM, AsyncLLM, SamplingParams
from tests.text.tokenizers_for_tests import byte_level

SIDE, TILE, TOKENS_OF_IMAGE = 448, 512, 64
NUM_NEW, BATCH = 32, 8
NUM_ASKED = 4
TEXT = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49280,
    "max_position_embeddings": 8192,
}
VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": TILE,
    "patch_size": 16,
}
QWEN_TEXT = {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}
QWEN_VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "window_size": 112,
}
"""The published shapes."""


def make(dtype: str = "float32") -> tuple[Idefics3ForConditionalGeneration, Idefics3Processor]:
    """Return the model and its processor."""
    backend = byte_level().inner.backend_tokenizer
    marks = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "\n\n"]
    backend.add_special_tokens(marks)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<unk>", padding_side="left")
    images = Idefics3ImageProcessorPil(size={"longest_edge": TILE}, max_image_size={"longest_edge": TILE})
    processor = Idefics3Processor(images, tokenizer, image_seq_len=TOKENS_OF_IMAGE)
    token_id = tokenizer.convert_tokens_to_ids("<image>")
    config = Idefics3Config(text_config=TEXT, vision_config=VISION, image_token_id=token_id, scale_factor=4)
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config).eval().to(getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model, processor


def make_qwen(dtype: str) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Return Qwen2.5-VL-3B's shape and its processor, which needs torchvision; an image has 256 tokens."""
    backend = byte_level().inner.backend_tokenizer
    marks = {"image_token_id": "<image>", "video_token_id": "<video>", "vision_start_token_id": "<begin>"}
    backend.add_special_tokens([*marks.values(), "<end>"])
    named = {"image_token": "<image>", "video_token": "<video>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<unk>", padding_side="left", extra_special_tokens=named
    )
    processor = Qwen2_5_VLProcessor(Qwen2VLImageProcessorPil(), tokenizer, Qwen2VLVideoProcessor())
    ids = {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in marks.items()}
    config = Qwen2_5_VLConfig(text_config=QWEN_TEXT, vision_config=QWEN_VISION, **ids)
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    torch.set_default_dtype(torch.float32)
    for name, parameter in model.named_parameters():  # as trained models are: else rounding grows with each layer
        if name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight")):
            parameter.data *= (2 * config.text_config.num_hidden_layers) ** -0.5
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model, processor


def pages(number: int) -> list[dict[str, Any]]:
    """Return prompts with an image each."""
    draw = np.random.default_rng(0)
    return [
        {
            "prompt": f"<image>{''.join(map(chr, draw.integers(97, 123, 24)))}?",
            "images": [draw.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)],
        }
        for _ in range(number)
    ]


def ours(llm: LLM, prompts: Sequence[dict[str, Any]]) -> int:
    """Answer all; return the number of tokens."""
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    return sum(len(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False))


@torch.inference_mode()
def plain(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    prompts: Sequence[dict[str, Any]],
    batch: int,
) -> int:
    """The same by `transformers`, in batches of this size."""
    count = 0
    for first in range(0, len(prompts), batch):
        some = prompts[first : first + batch]
        texts, images = [each["prompt"] for each in some], [each["images"] for each in some]
        inputs = processor(text=texts, images=images, padding=True, return_tensors="pt").to(model.dtype)
        output = model.generate(**inputs, max_new_tokens=NUM_NEW, do_sample=False)
        count += output[:, inputs["input_ids"].shape[1] :].numel()
    return count


class LlamaCpp:
    """llama.cpp's server with a model's two files, made by its own converter, in eight slots.

    Args:
        folder: where the files are made.
    """

    def __init__(self, model: PreTrainedModel, processor: ProcessorMixin, dtype: str, folder: Path) -> None:
        peer = PEERS["llamacpp"]
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        processor.tokenizer.save_pretrained(folder)
        processor.image_processor.save_pretrained(folder)
        files = folder / "text.gguf", folder / "mmproj.gguf"
        convert = [peer.python, "-m", "benchmarks.peers.convert_to_gguf", llamacpp_sources(peer), folder]
        for file, more in zip(files, ((), ("--mmproj",)), strict=True):
            kind = {"float32": "f32", "bfloat16": "bf16"}[dtype]
            subprocess.run([*map(str, convert), "--outfile", str(file), "--outtype", kind, *more], check=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        server = peer.root / "build" / "bin" / "llama-server"
        options = ["-np", BATCH, "-c", 1024 * BATCH, "-t", 2, "-tb", 2, "--port", self._port, "--no-warmup"]
        command = [server, "-m", files[0], "--mmproj", files[1], "--host", "127.0.0.1", *options]
        self._process = subprocess.Popen(list(map(str, command)), stderr=subprocess.DEVNULL)
        atexit.register(self._process.kill)
        while self._get("/health")[0] != 200:
            assert self._process.poll() is None, "llama-server ended while it was loading"
            time.sleep(0.2)
        self._marker = json.loads(self._get("/props")[1])["media_marker"]

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        except OSError:
            return 0, b""

    def _answer(self, prompt: dict[str, Any]) -> int:
        file = io.BytesIO()
        Image.fromarray(prompt["images"][0]).save(file, "png")
        asked = {
            "prompt_string": prompt["prompt"].replace("<image>", self._marker),
            "multimodal_data": [base64.b64encode(file.getvalue()).decode()],
        }
        more = {"n_predict": NUM_NEW, "ignore_eos": True, "temperature": 0, "cache_prompt": False}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        connection.request("POST", "/completion", json.dumps({"prompt": asked, **more}))
        answer = json.loads(connection.getresponse().read())
        assert "tokens_predicted" in answer, answer
        return int(answer["tokens_predicted"])

    def __call__(self, prompts: Sequence[dict[str, Any]]) -> int:
        """Answer all; return the number of tokens."""
        with ThreadPoolExecutor(BATCH) as pool:
            return sum(pool.map(self._answer, prompts))


def compare(
    num_pages: int, num_rounds: int, shape: str, dtype: str, options: dict[str, Any], *, with_llamacpp: bool
) -> None:
    """Measure each contender's rounds in turn."""
    model, processor = make_qwen(dtype) if shape == "qwen2.5-vl-3b" else make(dtype)
    llm = LLM(copy.deepcopy(model), processor, **options)
    contenders: dict[str, Callable[[Sequence[dict[str, Any]]], int]] = {
        "inflight": lambda prompts: ours(llm, prompts),
        "transformers, one by one": lambda prompts: plain(model, processor, prompts, 1),
        f"transformers, batches of {BATCH}": lambda prompts: plain(model, processor, prompts, BATCH),
    }
    if with_llamacpp:
        folder = Path(tempfile.mkdtemp())
        contenders["llama.cpp server"] = LlamaCpp(model, processor, dtype, folder)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(num_rounds):
        prompts = pages((number + 1) * num_pages)[-num_pages:]  # new ones: nothing of an earlier round is cached
        for name, run in contenders.items():
            start = time.perf_counter()
            assert run(prompts) == num_pages * NUM_NEW
            seconds[name].append(time.perf_counter() - start)
    own = median(seconds["inflight"])
    print("| | seconds a page | inflight is so much faster |\n|---|---:|---:|")
    for name, taken in seconds.items():
        print(f"| {name} | {median(taken) / num_pages:.2f} | {median(taken) / own:.2f} |")


def ask(num_questions: int, options: dict[str, Any]) -> None:
    """Ask about one image again and again."""
    model, processor = make()
    llm = LLM(model, processor, **options)
    first = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    llm.generate(pages(2)[1], first, use_tqdm=False)  # warm-up, with another image
    image, taken = pages(1)[0]["images"], []
    for prompt in pages(num_questions):
        start = time.perf_counter()
        llm.generate({"prompt": prompt["prompt"], "images": image}, first, use_tqdm=False)
        taken.append(time.perf_counter() - start)
    share = median(taken[1:]) / taken[0]
    print(f"first {taken[0]:.2f} s, then {', '.join(f'{each:.3f}' for each in taken[1:])} s: {share:.1%} of it")


def compare_text(num_rounds: int, options: dict[str, Any]) -> None:
    """Measure texts on this model and on its language model's class."""
    model, processor = make()
    plain_class = LlamaForCausalLM(LlamaConfig(**TEXT)).eval()
    plain_class.generation_config.eos_token_id = None
    llms = [LLM(each, processor.tokenizer, speculation="off", **options) for each in (model, plain_class)]
    for name, number in (("one stream", 1), ("eight streams", 8)):
        params = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
        prompts = [f"Text {each}: once upon a time" for each in range(number)]
        seconds: list[list[float]] = [[], []]
        for round_number in range(1 + num_rounds):
            for llm, taken in list(zip(llms, seconds, strict=True))[:: 1 if round_number % 2 else -1]:
                start = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                taken.append(time.perf_counter() - start)
        ours_taken, plain_taken = (median(each[1:]) for each in seconds)
        print(f"{name}: {128 * number / ours_taken:.1f} tokens/s, {plain_taken / ours_taken:.3f} of the text class's")


async def _stream(llm: AsyncLLM, prompt: str, until: float, gaps: list[float]) -> None:
    """Add the seconds between a text's tokens, until this time."""
    params = SamplingParams(temperature=0, max_tokens=8000, ignore_eos=True)
    stream, last = llm.generate(prompt, params), None
    async for _ in stream:
        now = time.perf_counter()
        if last is not None:
            gaps.append(now - last)
        last = now
        if now > until:
            break
    await stream.aclose()


async def _asks(llm: AsyncLLM, prompts: Sequence[dict[str, Any]], seconds: float) -> list[float]:
    """Send a prompt every `seconds`; return the time that each took."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    async def ask(number: int) -> float:
        await asyncio.sleep(number * seconds)
        start = time.perf_counter()
        async for _ in llm.generate(prompts[number], params):
            pass
        return time.perf_counter() - start

    return await asyncio.gather(*map(ask, range(len(prompts))))


async def beside(seconds: float, num_rounds: int, dtype: str, options: dict[str, Any]) -> None:
    """Measure streams of text, alone and beside images, in turn."""
    model, processor = make(dtype)
    gaps: dict[bool, list[float]] = {False: [], True: []}
    waits: list[float] = []
    draw = np.random.default_rng(1)
    four: list[dict[str, Any]] = [
        {
            "prompt": f"{'<image>' * 4}What are they?",
            "images": [draw.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8) for _ in range(4)],
        }
        for _ in range(1 + num_rounds * NUM_ASKED)
    ]
    async with AsyncLLM(model, processor, in_process=True, speculation="off", **options) as llm:
        await _asks(llm, four[:1], 0)
        for number in range(num_rounds):
            for has_images in (False, True):
                until = time.perf_counter() + NUM_ASKED * seconds
                some = four[1 + number * NUM_ASKED :][:NUM_ASKED] if has_images else []
                streams = [_stream(llm, f"Text {each}", until, gaps[has_images]) for each in range(4)]
                _, took = await asyncio.gather(asyncio.gather(*streams), _asks(llm, some, seconds))
                waits += took
    print("| milliseconds between tokens | p50 | p99 | p99.9 | longest |\n|---|---:|---:|---:|---:|")
    for has_images, own in gaps.items():
        times = " | ".join(f"{each:.0f}" for each in np.percentile(own, [50, 99, 99.9, 100]) * 1000)
        print(f"| {'beside images' if has_images else 'alone'} | {times} |")
    print(f"a prompt with four images: {median(waits):.1f} s")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--questions", type=int, default=0)
    parser.add_argument("--beside", type=float, default=0)
    parser.add_argument("--text", action="store_true")
    parser.add_argument("--shape", choices=("smolvlm-256m", "qwen2.5-vl-3b"), default="smolvlm-256m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--llamacpp", action="store_true")
    parser.add_argument("--quantization")
    arguments = parser.parse_args()
    print("; ".join(f"{name}: {value}" for name, value in describe_machine().items()))
    options = {} if arguments.quantization is None else {"quantization": arguments.quantization}
    if arguments.questions:
        ask(arguments.questions, options)
    elif arguments.text:
        compare_text(arguments.rounds, options)
    elif arguments.beside:
        asyncio.run(beside(arguments.beside, arguments.rounds, arguments.dtype, options))
    else:
        more = {"with_llamacpp": arguments.llamacpp}
        compare(arguments.pages, arguments.rounds, arguments.shape, arguments.dtype, options, **more)


if __name__ == "__main__":
    main()
