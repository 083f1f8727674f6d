"""Shared by all rungs: requests, and the account of their steps."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TypedDict

from inflight.observe.timeline import Lane, SlotUse

CACHE = "cache" if tuple(map(int, version("transformers").split(".")[:2])) >= (5, 24) else "past_key_values"
"""The name of a model's argument for its cache."""
MOST_LOGGED, MOST_LOGGED_IDS = 60, 10
"""Characters of a text, and ids of tokens, in a line of the log."""


@dataclass(frozen=True, slots=True)
class LessonRequest:
    """A prompt and how many tokens to generate for it, greedily.

    Attributes:
        arrival: the first step in which it may run.
    """

    prompt_token_ids: Sequence[int]
    max_new_tokens: int
    arrival: int = 0


@dataclass(slots=True)
class Answer:
    """One request's tokens, and when they arrived (seconds of `time.perf_counter()`)."""

    token_ids: list[int] = field(default_factory=list)
    first_token_time: float | None = None
    finished_time: float | None = None


class Options(TypedDict, total=False):
    """Options that each rung passes to its `Run`."""

    eos_token_ids: Sequence[int]
    log: Callable[[str], None] | None
    watch: Callable[["Run"], None] | None
    text_of: Callable[[Sequence[int]], str] | None


class Run:
    """The account of one run: answers in the order of the requests, and each step's lanes (slot: `Lane`).

    Args:
        requests: the requests of the run.
        eos_token_ids: tokens that end an answer early.
        log: receives lines such as "slot 2 <- req 5 (10 token cap)"; None: no log.
        watch: called after each step, with this account.
        text_of: returns the text of tokens, for the log; None: the log shows their ids.
    """

    def __init__(
        self,
        requests: Sequence[LessonRequest],
        eos_token_ids: Sequence[int] = (),
        log: Callable[[str], None] | None = None,
        watch: Callable[["Run"], None] | None = None,
        text_of: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.requests = requests
        self.eos_token_ids = frozenset(eos_token_ids)
        self.answers = [Answer() for _ in requests]
        self.steps: list[dict[int, Lane]] = []
        self.start_time = time.perf_counter()
        self.log = log or (lambda line: None)
        self.is_logged = log is not None
        self._watch = watch or (lambda run: None)
        self._text_of = text_of

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def seconds(self) -> float:
        """Seconds from the start to the end of the last answer."""
        return max((answer.finished_time or 0.0 for answer in self.answers), default=0.0) - self.start_time

    @property
    def token_ids(self) -> list[list[int]]:
        """The generated tokens, one list for each request."""
        return [answer.token_ids for answer in self.answers]

    def take_arrived(self, queue: deque[int], most: int) -> list[int]:
        """Take the first requests of a queue that have arrived by now, up to a number."""
        taken: list[int] = []
        while queue and len(taken) < most and self.requests[queue[0]].arrival <= len(self.steps):
            taken.append(queue.popleft())
        return taken

    def wait(self) -> None:
        """Record an idle step."""
        self._step({})

    def admit(self, request: int, slot: int) -> None:
        """Record that a request takes a slot."""
        admitted = self.requests[request]
        self.log(
            f"slot {slot} <- req {request} ({admitted.max_new_tokens} token cap): "
            f"{len(admitted.prompt_token_ids)} prompt tokens{self._shown(admitted.prompt_token_ids)}"
        )

    def log_end(self, request: int, slot: int, of: int | None = None) -> None:
        """Log that a request leaves its slot, with its answer.

        Args:
            of: for how many tokens the slot was computing; None: for no more than the answer has.
        """
        token_ids = self.answers[request].token_ids
        how_many = f"{len(token_ids)} tokens" if of is None else f"{len(token_ids)} of {of} tokens useful"
        self.log(f"slot {slot}: req {request} is done, {how_many}{self._shown(token_ids)}")

    def _shown(self, token_ids: Sequence[int]) -> str:
        """Tokens for the log, shortened: their text, or their ids."""
        if not self.is_logged:
            return ""
        if self._text_of is not None:
            text = self._text_of(token_ids)
            return f": {text if len(text) <= MOST_LOGGED else text[: MOST_LOGGED - 1] + '…'!r}"
        return f": {' '.join(map(str, token_ids[:MOST_LOGGED_IDS]))}{' …' * (len(token_ids) > MOST_LOGGED_IDS)}"

    def rectangle(self, slots: Mapping[int, int], width: int, num_keys: int) -> None:
        """Record a forward pass over a rectangle: a row of `width` tokens and `num_keys` keys for each slot's request.

        What a row does not need is padding; if its answer is already complete, all of the row is."""
        lanes = {}
        for slot, request in slots.items():
            answer, num_prompt_tokens = self.answers[request], len(self.requests[request].prompt_token_ids)
            if answer.finished_time is not None:
                lanes[slot] = Lane(request, "padding", width, width, num_keys, num_keys)
                continue
            num_padding_keys = num_keys - num_prompt_tokens - len(answer.token_ids)
            if answer.token_ids:
                lanes[slot] = Lane(request, "decode", width, 0, num_keys, num_padding_keys)
            else:
                lanes[slot] = Lane(request, "prefill", width, min(num_padding_keys, width), num_keys, num_padding_keys)
        self._step(lanes)

    def ragged(self, spans: Mapping[int, tuple[int, int, int]]) -> None:
        """Record a forward pass over an unpadded row: for each slot its request, number of tokens, number of keys."""
        lanes = {}
        for slot, (request, num_tokens, num_keys) in spans.items():
            use: SlotUse = "decode" if self.answers[request].token_ids and num_tokens == 1 else "prefill"
            lanes[slot] = Lane(request, use, num_tokens, 0, num_keys, 0)
        self._step(lanes)

    def _step(self, lanes: dict[int, Lane]) -> None:
        self.steps.append(lanes)
        self._watch(self)

    def add(self, request: int, token: int) -> bool:
        """Add a token to a request's answer; return whether it is the last one."""
        answer, now = self.answers[request], time.perf_counter()
        answer.token_ids.append(token)
        answer.first_token_time = answer.first_token_time or now
        is_last = token in self.eos_token_ids or len(answer.token_ids) >= self.requests[request].max_new_tokens
        if is_last:
            answer.finished_time = now
        return is_last
