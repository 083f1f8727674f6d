"""What the rungs have in common: what they are asked, and the account that they keep of what they did."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

SlotUse: TypeAlias = Literal["prefill", "decode", "padding"]
"""What a slot does in a step; "padding" computes something that nobody needs."""


@dataclass(frozen=True, slots=True)
class LessonRequest:
    """A prompt and how many tokens to generate for it, greedily."""

    prompt_token_ids: Sequence[int]
    max_new_tokens: int


@dataclass(slots=True)
class Answer:
    """One request's tokens, and when they came (seconds of `time.perf_counter()`)."""

    token_ids: list[int] = field(default_factory=list)
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(frozen=True, slots=True)
class Lane:
    """What one slot did in one step: for which request, and how many of the step's token places it took."""

    request: int
    use: SlotUse
    num_tokens: int


class Run:
    """The account of one run: answers in the order of the requests, and each step's lanes (slot: `Lane`).

    Args:
        requests: what was asked.
        eos_token_ids: tokens that end an answer early.
        log: where lines such as "slot 2 <- req 5 (10 token cap)" go; None keeps silent.
    """

    def __init__(
        self,
        requests: Sequence[LessonRequest],
        eos_token_ids: Sequence[int] = (),
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.requests = requests
        self.eos_token_ids = frozenset(eos_token_ids)
        self.answers = [Answer() for _ in requests]
        self.steps: list[dict[int, Lane]] = []
        self.start_time = time.perf_counter()
        self._log = log or (lambda line: None)

    @property
    def token_ids(self) -> list[list[int]]:
        """The generated tokens, one list for each request."""
        return [answer.token_ids for answer in self.answers]

    def log(self, line: str) -> None:
        """Say something to whoever listens."""
        self._log(line)

    def admit(self, request: int, slot: int) -> None:
        """A request takes a slot."""
        asked = self.requests[request]
        self.log(
            f"slot {slot} <- req {request} ({asked.max_new_tokens} token cap): "
            f"{len(asked.prompt_token_ids)} prompt tokens"
        )

    def step(self, lanes: dict[int, Lane]) -> None:
        """One forward pass."""
        self.steps.append(lanes)

    def add(self, request: int, token: int) -> bool:
        """One more token for a request; whether it was its last."""
        answer, now = self.answers[request], time.perf_counter()
        answer.token_ids.append(token)
        answer.first_token_time = answer.first_token_time or now
        is_last = token in self.eos_token_ids or len(answer.token_ids) >= self.requests[request].max_new_tokens
        if is_last:
            answer.finished_time = now
        return is_last
