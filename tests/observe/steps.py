"""Captured steps of small models without a tokenizer."""

from typing import Any

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.params import SamplingParams
from inflight.engine.engine import Engine
from inflight.observe.step_capture import StepCapture
from inflight.observe.step_view import StepView
from tests import others, zoo

MIXED = ([7, 8, 9], list(range(10, 19)), list(range(20, 50)))
"""With 10 tokens per step, step 1 has a decode, the end of a prefill and a chunk."""


def captured(prompts: Any = MIXED, step: int = 1, name: str = "llama", n: int = 1, **options: Any) -> StepView:
    build = zoo.build if name in zoo.ARCHITECTURES else others.build
    engine = Engine(build(name), EngineConfig(**{"max_num_batched_tokens": 10, "speculation": "off", **options}))
    capture = StepCapture(engine.runner.compare_attention(), [step])
    engine.observer = capture.observe
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=step + 1, n=n)
        engine.submit(engine.inputs.accept(str(number), prompt, params))
    while not capture.is_complete:
        engine.step()
    (view,) = capture.views
    return view
