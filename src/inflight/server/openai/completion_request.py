"""The request of `/v1/completions`, and which prompts it contains: OpenAI's legacy API with vLLM's extensions."""

from typing import Annotated, ClassVar, cast

from pydantic import Field

from inflight.server.openai.sampling_fields import IGNORED, NOT_SUPPORTED_YET, SamplingFields
from inflight.server.serving.settings import ServerSettings
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.strict_model import Many

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""


class CompletionRequest(SamplingFields):
    """The body of a request.

    Attributes:
        prompt: a text, token ids, or a list of either.
        best_of: how many sequences to generate; the `n` with the highest cumulative log-probability are returned.
        echo: begin the text with the prompt's text.
        logprobs: how many of the likeliest tokens to report for each token.
        add_special_tokens: whether a text gets the special tokens that the tokenizer puts around it; null: yes.
        max_tokens: null: 16. With 0 nothing is generated, which with `echo` and `logprobs` scores the prompt.
    """

    NOT_SUPPORTED: ClassVar = {**NOT_SUPPORTED_YET, "suffix": ("",), "prompt_embeds": ()}
    IGNORED: ClassVar = IGNORED
    MAY_HAVE_MORE = True
    OF_OTHERS: ClassVar = {
        *("do_sample", "input", "max_completion_tokens", "max_output_tokens", "messages", "tools", "top_logprobs")
    }

    prompt: str | Many[int] | Many[str] | Many[Many[int]]
    best_of: Annotated[int, Field(ge=1)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    add_special_tokens: bool | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list, in whichever form they were sent. An empty list is one prompt of no tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt or isinstance(self.prompt[0], int):
            return [cast(list[int], self.prompt)]
        return self.prompt

    @property
    def num_answered(self) -> int:
        """Sequences that are returned for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def num_generated(self) -> int:
        """Sequences that are generated for each prompt."""
        return self.num_answered if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """Whether the best of several sequences are chosen."""
        return self.num_generated > self.num_answered

    @property
    def generates_nothing(self) -> bool:
        """Whether only the prompt is wanted. The engine then generates one token, which is not returned."""
        return self.max_tokens == 0

    def check(self, settings: ServerSettings) -> None:
        """Raise `ApiError` for fields that contradict each other or exceed the operator's limits."""
        if self.num_generated < self.num_answered:
            message = f"best_of is {self.best_of}; it must be at least n, which is {self.num_answered}"
            raise ApiError(400, message, param="best_of")
        if self.is_ranked and self.stream:
            raise ApiError(400, "best_of cannot be combined with stream: the best is known at the end", param="best_of")
        self.check_limits(best_of=settings.max_n, logprobs=settings.max_logprobs)
