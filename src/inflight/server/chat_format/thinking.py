"""`Thinking`: what a request says about its model's thoughts, and the variables of the chat template that say it.

Knows no API: each has its own fields.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from inflight.server.wire.api_errors import ApiError

MAX_EFFORT = 64
"""Characters of the word for an effort."""

_SWITCHES = (
    ("enable_thinking", re.compile(r"\benable_thinking\b")),
    ("thinking", re.compile(r"\b(?:not thinking|thinking is (?:not )?defined)\b")),
)
"""The variables by which chat templates are told whether the model thinks: Qwen's and GLM's, and DeepSeek's."""

_EFFORT = re.compile(r"\breasoning_effort\b")
_NO_EFFORT = re.compile(r"\breasoning_effort\b[^%}]{0,200}[\"']none[\"']")


@dataclass(frozen=True, slots=True)
class Thinking:
    """What a request wants.

    Attributes:
        is_wanted: whether the model is to think; None: as its chat template has it.
        effort: how much, in the model's own words, such as "low"; None: as its chat template has it.
        most_tokens: how many tokens a thought may have, where its marks are known; None: any number.
        param: the request's field, for error messages.
    """

    is_wanted: bool | None = None
    effort: str | None = None
    most_tokens: int | None = None
    param: str = "reasoning_effort"

    def variables(self, chat_template: str) -> Mapping[str, Any]:
        """Return what tells the chat template; nothing if it has no variable for it."""
        told: dict[str, Any] = {}
        if self.effort is not None:
            mention = _NO_EFFORT if self.effort == "none" else _EFFORT
            if mention.search(chat_template):
                told["reasoning_effort"] = self.effort
        switch = next((name for name, mention in _SWITCHES if mention.search(chat_template)), None)
        if self.is_wanted is not None and switch is not None:
            told[switch] = self.is_wanted
        return told

    def refusal(self) -> ApiError:
        """The error for a model that always thinks, where it is not to."""
        return ApiError(
            400,
            f"{self.param} says that this model is not to think, and there is no way to tell it",
            param=self.param,
            code="unsupported_value",
        )


AS_THE_MODEL_WANTS = Thinking()


def thinking_of_effort(effort: str | None, param: str) -> Thinking:
    """Return what OpenAI's word for an effort means: "none" that the model is not to think."""
    if effort is None:
        return AS_THE_MODEL_WANTS
    return Thinking(is_wanted=effort != "none", effort=effort, param=param)


def with_budget(thinking: Thinking, num_tokens: int | None, param: str) -> Thinking:
    """Return the same with a limit of the tokens of a thought (None: there is none); without any, the model is not to
    think."""
    if num_tokens is None:
        return thinking
    if num_tokens:
        return replace(thinking, most_tokens=num_tokens)
    return Thinking(is_wanted=False, param=param)
