"""`PoolingEngine`: runs the texts of many requests on one model that pools, step by step.

Before each step it decides which texts run in it: whole ones, one of each request in turn, as many as fit into the
token budget. So a request of one text is not held up by one of thousands. Where texts can share what they begin with,
that counts once.
"""

import logging
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from transformers import PreTrainedModel

from inflight.contracts.config import EngineConfig
from inflight.contracts.errors import InvalidRequestError, QueueFullError
from inflight.contracts.model_info import ModelInfo
from inflight.contracts.pooling import PooledText, PoolingPlan, Values
from inflight.contracts.record import STEP_SIZES, EngineStats
from inflight.execution.hf.load import ModelSource
from inflight.execution.hf.watched_weights import WatchedWeights
from inflight.execution.pooling import PoolingRunner
from inflight.pooling.requests import refusal_to_generate

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PooledRequest:
    """A request that has ended.

    Attributes:
        values: the numbers of each of its texts; empty if it failed.
        error: why it failed.
    """

    request_id: str
    values: list[Values]
    error: str | None = None


@dataclass(slots=True)
class _Request:
    request_id: str
    texts: Sequence[PooledText]
    values: list[Values] = field(default_factory=list)
    error: str | None = None

    @property
    def has_ended(self) -> bool:
        return self.error is not None or len(self.values) == len(self.texts)

    def left(self) -> Iterator[PooledText]:
        """The texts that have not run."""
        return iter(() if self.has_ended else self.texts[len(self.values) :])


class PoolingEngine:
    """Runs requests on one model. Not thread-safe: one caller at a time.

    Args:
        model: hub id, folder, or a loaded model.
        config: how to load it; `max_num_batched_tokens` is the budget of a step. A longer text runs alone.
        plan: what the checkpoint says about pooling.

    Raises:
        ModelError: the model cannot be loaded, or does not run as a packed row.
    """

    def __init__(self, model: ModelSource, config: EngineConfig, plan: PoolingPlan) -> None:
        self.config = config
        self.observer: None = None  # there are no records of its steps
        self._runner = PoolingRunner(model, config, plan)
        self._watched = WatchedWeights(model) if isinstance(model, PreTrainedModel) else None
        self.model_info: ModelInfo = self._runner.info
        self._requests: OrderedDict[str, _Request] = OrderedDict()  # those that were served last come last
        self._num_requests = self._num_steps = self._num_tokens = self._num_shared_tokens = 0
        self._num_steps_by_size = [0] * (len(STEP_SIZES) + 1)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether another step would do something."""
        return not all(request.has_ended for request in self._requests.values())

    def accept(self, *args: object, **options: object) -> NoReturn:
        """Refuse a prompt. Raises `InvalidRequestError`."""
        raise refusal_to_generate(self.model_info)

    def default_sampling_params(self) -> NoReturn:
        """Refuse to generate. Raises `InvalidRequestError`."""
        self.accept()

    def submit(self, request_id: str, texts: Sequence[PooledText]) -> None:
        """Queue a request of at least one text.

        Raises:
            InvalidRequestError: the model cannot run it.
            QueueFullError: too many texts wait already.
        """
        if self._watched is not None and self._watched.have_changed:
            raise InvalidRequestError(
                "the weights of the model that was given have changed since it was loaded; call reload_weights()"
            )
        info, limit = self.model_info, self.config.max_num_waiting
        for text in texts:
            if not 0 < len(text.token_ids) <= info.max_model_len:
                raise InvalidRequestError(f"a text has {len(text.token_ids)} tokens, not 1 to {info.max_model_len}")
            if not 0 <= min(text.token_ids) <= max(text.token_ids) < info.vocab_size:
                raise InvalidRequestError(f"a token id is out of range; this model has {info.vocab_size} tokens")
        if limit is not None and self._num_waiting >= limit:
            raise QueueFullError(f"{self._num_waiting} texts wait already, and max_num_waiting is {limit}; try later")
        self._num_requests += 1
        self._requests[request_id] = _Request(request_id, texts)

    def abort(self, request_id: str) -> None:
        """Forget a request, if it is unfinished."""
        self._requests.pop(request_id, None)

    def step(self) -> list[str]:
        """Run one step. Returns the requests that have ended with it, which `take` gives."""
        chosen = list(self._chosen())
        if not chosen:
            return []
        requests = {request.request_id: request for request, _, _ in chosen}
        texts, num_shared = [text for _, text, _ in chosen], sum(start for _, _, start in chosen)
        try:
            values = self._runner.run(texts)
        except Exception as error:
            logger.exception("a step failed")
            for request in requests.values():
                request.error = repr(error)
            return list(requests)
        num_tokens = sum(len(text.token_ids) for text in texts) - num_shared
        self._num_steps += 1
        self._num_shared_tokens += num_shared
        self._num_tokens += num_tokens
        self._num_steps_by_size[bisect_left(STEP_SIZES, num_tokens)] += 1
        for (request, _, _), own in zip(chosen, values, strict=True):
            request.values.append(own)
        for request_id in requests:
            self._requests.move_to_end(request_id)  # behind those that were not served
        return [request_id for request_id, request in requests.items() if request.has_ended]

    def take(self, request_id: str) -> PooledRequest | None:
        """A request that has ended, and forget it; None: it has not."""
        request = self._requests[request_id]
        if not request.has_ended:
            return None
        del self._requests[request_id]
        return PooledRequest(request_id, request.values if request.error is None else [], request.error)

    def stats(self) -> EngineStats:
        """What the engine has done since it was made, and what it holds now."""
        return EngineStats(
            num_requests=self._num_requests,
            num_prompt_tokens=self._num_tokens + self._num_shared_tokens,
            num_cached_tokens=self._num_shared_tokens,
            num_generated_tokens=0,
            num_steps=self._num_steps,
            num_preemptions=0,
            num_running=0,
            num_waiting=self._num_waiting,
            num_blocks_used=0,
            num_blocks_cached=0,
            num_blocks_free=0,
            num_step_tokens=self._num_tokens,
            num_steps_by_size=tuple(self._num_steps_by_size),
        )

    @property
    def _num_waiting(self) -> int:
        """Texts that have not run."""
        return sum(len(request.texts) - len(request.values) for request in self._requests.values())

    def _chosen(self) -> Iterator[tuple[_Request, PooledText, int]]:
        """The texts of the next step, each with its request, and how many of its first tokens another one computes."""
        left, prefixes = self.config.max_num_batched_tokens, self._runner.prefixes()
        turns = deque((request, request.left()) for request in self._requests.values())
        while turns:
            request, texts = turns.popleft()
            if (text := next(texts, None)) is None:
                continue
            start = prefixes.place(text).start
            length = len(text.token_ids) - start
            if length > left and left < self.config.max_num_batched_tokens:
                return
            left -= length
            yield request, text, start
            turns.append((request, texts))
