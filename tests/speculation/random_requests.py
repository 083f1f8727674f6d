"""Random requests to the embedded model that use every parameter, and their outputs, bit by bit."""

import json
import random
from collections.abc import Sequence
from typing import Any

from inflight import LLM, SamplingParams, StructuredOutput
from inflight.contracts.api.outputs import RequestOutput

BEGINNINGS = (
    "Once upon a time there was a little girl named Lily.",
    "Tom had a red ball. Tom had a red ball. Tom had",
    "One day, Ben went to the park with his mom and",
    "The cat",
)
SCHEMA = {
    "type": "object",
    "properties": {
        "the_name_of_the_child": {"type": "string", "maxLength": 10},
        "likes_ice_cream": {"type": "boolean"},
        "favourite_colour": {"enum": ["red", "redder", "blue"]},
    },
    "required": ["the_name_of_the_child", "likes_ice_cream", "favourite_colour"],
}
OUTPUTS = (
    StructuredOutput(json_schema=json.dumps(SCHEMA)),
    StructuredOutput(regex=r"(very )+(big|small) dog"),
    StructuredOutput(choice=("yes", "yes, of course", "no")),
    StructuredOutput(json_object=True),
)


def random_params(rng: random.Random) -> SamplingParams:
    """Parameters of which each is likely to be left out."""

    def perhaps(share: float, **options: Any) -> dict[str, Any]:
        return options if rng.random() < share else {}

    options: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.0, 1.5]),
        "max_tokens": rng.choice([1, 2, 5, 20, 40]),
        "seed": rng.randrange(1 << 30),
        "n": rng.choice([1, 1, 1, 1, 3]),
    }
    options |= perhaps(0.2, top_p=rng.choice([0.5, 0.9]))
    options |= perhaps(0.2, top_k=rng.choice([2, 40]))
    options |= perhaps(0.1, min_p=0.05)
    options |= perhaps(0.15, presence_penalty=rng.uniform(-2, 2))
    options |= perhaps(0.15, frequency_penalty=rng.uniform(-2, 2))
    options |= perhaps(0.15, repetition_penalty=rng.uniform(0.5, 2))
    options |= perhaps(0.1, logit_bias={rng.randrange(1000): rng.uniform(-5, 5) for _ in range(3)})
    options |= perhaps(0.4, logprobs=rng.choice([0, 3]))
    options |= perhaps(0.1, prompt_logprobs=rng.choice([0, 2]))
    if rng.random() < 0.25:
        return SamplingParams(**options, structured_output=rng.choice(OUTPUTS))
    options |= perhaps(0.1, min_tokens=min(options["max_tokens"], rng.choice([1, 4])))
    options |= perhaps(0.2, stop=rng.sample([".", " the", "ed", "\n", "mom and"], 2))
    options |= perhaps(0.1, include_stop_str_in_output=True)
    options |= perhaps(0.1, stop_token_ids=[rng.randrange(1000) for _ in range(4)])
    options |= perhaps(0.2, bad_words=["mom", " and the", "Lily"])
    options |= perhaps(0.1, ignore_eos=True)
    return SamplingParams(**options)


def random_requests(number: int, seed: object) -> tuple[list[str], list[SamplingParams]]:
    """Prompts, and the parameters of each."""
    rng = random.Random(str(seed))
    prompts = [rng.choice(BEGINNINGS)[rng.choice([0, 0, 0, 5]) :] for _ in range(number)]
    return prompts, [random_params(rng) for _ in range(number)]


def generate(llm: LLM, prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[RequestOutput]:
    outputs: list[RequestOutput] = llm.generate(list(prompts), list(params), use_tqdm=False)
    return outputs


def said(output: RequestOutput) -> object:
    """A request's complete output, without its times."""
    return output.outputs, output.prompt_logprobs, output.error


def sequences(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Prompt and output of each sequence."""
    return [[*each.prompt_token_ids, *one.token_ids] for each in outputs for one in each.outputs]
