"""A model that writes what a script says, token by token through the real engine, with a context for real agents."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from inflight import AsyncLLM
from inflight.contracts.api.config import BACKGROUND
from inflight.contracts.api.structured_output import StructuredOutput
from inflight.demo_model import DEMO_MODEL
from inflight.text.tokenizer_files import read_tokenizer
from tests.agents.turns import TEMPLATE
from tests.server.serving import RunningServer

TO_OTHERS = "Done."
"""The answer to requests that follow no script, such as those for a title."""


@dataclass(slots=True)
class Answered:
    """A request of the script: the tokens of its prompt, and how many of them were cached."""

    num_prompt_tokens: int
    num_cached_tokens: int


class Puppet(AsyncLLM):
    """Answers requests that carry a mark with the next text of its script.

    Attributes:
        mark: what the prompts of scripted requests contain.
        script: the remaining texts; or what makes one of the prompt.
        answered: the scripted requests so far.
    """

    mark: str = "# Tools"
    script: list[str | Callable[[str], str]]
    answered: list[Answered]

    def play(self, script: Sequence[str], mark: str = "# Tools") -> None:
        """Follow a script from now on."""
        self.script, self.answered, self.mark = [*script], [], mark

    async def stream(self, prompt: Any, params: Any = None, request_id: Any = None, **options: Any) -> Any:  # type: ignore[override]
        assert self.tokenizer is not None
        if options.get("priority") == BACKGROUND:
            async for delta in super().stream(prompt, params, request_id, **options):
                yield delta
            return
        asked = self.tokenizer.decode(prompt, skip_special_tokens=False)
        is_scripted = self.mark in asked and bool(self.script)
        text = self.script.pop(0) if is_scripted else TO_OTHERS
        text = text if isinstance(text, str) else text(asked)
        only = StructuredOutput(choice=[text])
        params = replace(params, structured_output=only, max_tokens=4000, min_tokens=0, stop=(), temperature=0.0)
        async for delta in super().stream(prompt, params, request_id, **options):
            if delta.output is not None and is_scripted:
                self.answered.append(Answered(len(prompt), delta.output.metrics.num_cached_tokens))
            yield delta


@contextmanager
def puppet_server(make: type[Puppet] = Puppet) -> Iterator[RunningServer]:
    """Serve a puppet under any model name."""
    tokenizer = read_tokenizer(str(DEMO_MODEL)).inner
    tokenizer.chat_template = TEMPLATE
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=300_000, **sizes, **ends)
        model = LlamaForCausalLM(config).eval()
    llm = make(model, tokenizer, in_process=True, num_blocks=40_000, max_model_len=250_000)
    llm.play([])
    with RunningServer(llm, model_name="puppet", model_aliases=("*",)) as server:
        yield server
