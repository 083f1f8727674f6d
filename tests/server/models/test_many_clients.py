"""Many clients at once ask for more models than there is room for; some leave early. Everybody else is answered."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.models.serving import MODELS, RunningModels, expected
from tests.server.serving import read_until, send

PROMPT = list(range(5, 15))
NUM_TOKENS = 6
NUM_REQUESTS = 30


@pytest.mark.parametrize("max_loaded", [1, 2])
def test_everybody_who_stays_is_answered(folders: dict[str, str], max_loaded: int) -> None:
    right = {name: expected(name, PROMPT, NUM_TOKENS) for name in MODELS}
    ways = random.Random(max_loaded)
    asked = [(ways.choice(list(MODELS)), ways.choice(["whole", "stream", "leaves"])) for _ in range(NUM_REQUESTS)]
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}

    with RunningModels(folders, max_loaded_models=max_loaded) as server:

        def ask(name: str, way: str) -> str:
            if way == "whole":
                text: str = server.complete(name, **body)["choices"][0]["text"]
                return text
            if way == "stream":
                chunks = server.client.completions.create(model=name, stream=True, **body)  # type: ignore[call-overload]
                return "".join(chunk.choices[0].text for chunk in chunks)
            with server.connection() as connection:
                send(connection, "/v1/completions", model=name, stream=True, **body)
                read_until(connection, b":")  # the head, or a comment
            return right[name]

        with ThreadPoolExecutor(12) as clients:
            answers = list(clients.map(lambda each: ask(*each), asked))
        assert answers == [right[name] for name, _ in asked]
        server.wait_until_unused()
        counted = server.samples
        loads = sum(counted["inflight:model_loads_total", name] for name in MODELS)
        assert loads - sum(counted["inflight:model_unloads_total", name] for name in MODELS) <= max_loaded
        assert sum(counted["inflight:model_load_failures_total", name] for name in MODELS) == 0
