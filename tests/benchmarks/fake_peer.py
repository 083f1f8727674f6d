"""A runner without an engine: the model's name determines its answers."""

import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.protocol import Model, RunnerError, Settings, Times, serve
from benchmarks.workloads import Request


class FakeModel:
    def __init__(self, settings: Settings) -> None:
        if settings.model == "missing":
            raise RunnerError("there is no such model")
        self._behaviour = settings.model
        self.options: dict[str, Any] = {"slots": settings.num_slots}

    def generate(self, requests: Sequence[Request]) -> list[Times]:
        print("a library that talks")  # this must not be mistaken for an answer
        if self._behaviour == "dies":
            sys.exit("out of luck")
        start = time.perf_counter()
        too_few = 1 if self._behaviour == "stops early" else 0
        return [Times(request.num_output_tokens - too_few, start + 0.25, start + 0.5) for request in requests]


def load(settings: Settings) -> Model:
    return FakeModel(settings)


if __name__ == "__main__":
    serve(load, modules=("json",), distributions=("inflight-llm", "a-package-that-nobody-has"))
