"""`ReplicatedEngine`: several engines' processes as the one engine that `LLM` steps.

A step of it waits until any of them has something to say. Requests are sent as places become free, in the order in
which they came, so that none waits at a busy engine while another has nothing to do. The requests of an engine that has
died are run again elsewhere: as the same request gives the same tokens everywhere, those that were heard are left out.
So are all requests after an exception in the middle of the bookkeeping (`start_over`).
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue

from inflight.contracts.config import EngineConfig
from inflight.contracts.errors import EngineDeadError
from inflight.contracts.model_info import ModelInfo
from inflight.contracts.outputs import SequenceOutput
from inflight.contracts.params import SamplingParams
from inflight.engine.admission import AcceptedRequest, Admission
from inflight.engine.process.protocol import Abort, CloseAdapter, Generate, Load, OpenAdapter
from inflight.engine.process.session import DirectMailbox
from inflight.garbage_collection import call_after
from inflight.replicas.engine_client import Delivery, EngineClient
from inflight.replicas.launch import Launches
from inflight.text.tokenizer import Tokenizer

IN_WORK_FOR_EACH_SLOT = 2
"""So that another request waits where one gives its slot back."""
MOST_DEATHS = 2
"""A request that so many engines have died of, perhaps, ends with an error."""


@dataclass(slots=True, eq=False)
class _Request:
    """A request that has not ended.

    Attributes:
        num_heard: by sequence, how many tokens its caller has.
        num_given: by sequence, how many the engine has given where it runs now.
        ended: the sequences whose end its caller has heard of.
        attempt: stands for its being where it is; letters of earlier attempts mean nothing.
        place: what is left when the request ends or moves.
    """

    accepted: AcceptedRequest
    num_heard: dict[int, int] = field(default_factory=dict)
    num_given: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    num_deaths: int = 0
    attempt: object = None
    place: ExitStack = field(default_factory=ExitStack)
    delivery: Delivery | None = None


class ReplicatedEngine:
    """See `Engine`, whose part for `LLM` it plays.

    Args:
        client: its engines, which end with it.
        config, tokenizer: those of each engine.

    Raises:
        ModelError, EngineDeadError: no engine can be started.
    """

    def __init__(self, client: EngineClient, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        self.config = config
        self.outbox: deque[SequenceOutput] = deque()
        self.observer: None = None
        self._client = client
        call_after(self, partial(_end, client))
        ready = client.start().result()
        self.model_info: ModelInfo = ready.ready.model_info
        self._default_params = ready.ready.default_params
        self._admission = Admission(config, self.model_info, tokenizer)
        self._requests: dict[str, _Request] = {}
        self._backlog: deque[_Request] = deque()
        self._num_in_work = 0
        self._news: SimpleQueue[tuple[object, str, object]] = SimpleQueue()
        self._has_news = threading.Event()
        self._is_changing = False

    @property
    def is_torn(self) -> bool:
        """See `Engine`."""
        return self._is_changing

    def default_sampling_params(self) -> SamplingParams:
        """See `Engine`."""
        return self._default_params

    def accept(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter_source: str | None = None,
    ) -> AcceptedRequest:
        """See `Engine`."""
        return self._admission.accept(
            request_id,
            prompt_token_ids,
            params,
            priority=priority,
            cache_salt=cache_salt,
            adapter_source=adapter_source,
        )

    def open_adapter(self, source: str) -> None:
        """See `Engine`; all engines read it. Raises `AdapterError`, `EngineDeadError`."""
        for session in self._client.sessions().values():
            answers: SimpleQueue[object] = SimpleQueue()
            with session.mailbox(partial(DirectMailbox, take=answers.put)) as mailbox:
                session.send(OpenAdapter(mailbox.address, source))
                if isinstance(answer := answers.get(), Exception):
                    raise answer

    def close_adapter(self, source: str) -> None:
        """See `Engine`."""
        for session in self._client.sessions().values():
            session.send(CloseAdapter(source))

    def compile(self, accepted: AcceptedRequest) -> AcceptedRequest:
        """Nothing: the engine that gets the request does that."""
        return accepted

    def submit(self, accepted: AcceptedRequest) -> None:
        """Queue a request."""
        with self._changing():
            self._queue(_Request(accepted))

    def abort(self, request_id: str) -> None:
        """End a request, if it is unfinished."""
        with self._changing():
            request = self._requests.pop(request_id, None)
            if request is not None:
                self._give_up(request)

    def advance(self) -> None:
        """Wait until an engine has something to say, and put all that has come into the outbox.

        Raises:
            InvalidRequestError: a request cannot be run.
            EngineGivenUpError: all engines have died too often.
        """
        while self._backlog and self._has_room():
            with self._changing():
                self._send(self._backlog[0])
                self._backlog.popleft()
        if not self._num_in_work:
            return
        self._has_news.wait()
        with self._changing():
            self._has_news.clear()
            refusals = [error for letter in self._letters() if (error := self._take_in(*letter)) is not None]
        if refusals:
            raise refusals[0]

    def start_over(self, requests: Iterable[tuple[AcceptedRequest, Sequence[SequenceOutput]]] = ()) -> None:
        """See `Engine`."""
        self._is_changing = True
        for request in self._requests.values():
            if request.delivery is not None:
                self._give_up(request)
        self._requests.clear()
        self._backlog.clear()
        self.outbox.clear()
        self._num_in_work = 0
        for accepted, told in requests:
            request = _Request(accepted)
            for output in told:
                request.num_heard[output.index] = request.num_heard.get(output.index, 0) + len(output.new_token_ids)
                if output.finish_reason is not None:
                    request.ended.add(output.index)
            self._queue(request)
        self._is_changing = False

    def save_prefixes(self, seconds: float) -> None:
        """Refuse: it is not known which engine has them. Raises `ValueError`."""
        raise ValueError("several replicas cannot say when a prefix is saved; pin it with replicas=1, and all find it")

    def pin_prefix(self, token_ids: Sequence[int], cache_salt: str | None, adapter_source: str | None = None) -> None:
        """See `save_prefixes`."""
        self.save_prefixes(0.0)

    # ------------------------------------------------------------------------------------- requests

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Whatever ends this block early leaves the bookkeeping half done."""
        self._is_changing = True
        yield
        self._is_changing = False

    def _has_room(self) -> bool:
        """Whether an engine has a place for another request. Those that have died start again meanwhile."""
        self._client.start().result()
        return self._num_in_work < IN_WORK_FOR_EACH_SLOT * self.config.max_num_seqs * len(self._client.sessions())

    def _queue(self, request: _Request) -> None:
        self._requests[request.accepted.request.request_id] = request
        self._backlog.append(request)

    def _letters(self) -> Iterator[tuple[object, str, object]]:
        """All that has come."""
        while True:
            try:
                yield self._news.get_nowait()
            except Empty:
                return

    def _take_in(self, attempt: object, request_id: str, letter: object) -> Exception | None:
        """Take in what an engine says of a request. Returns why it refuses it, if it does."""
        request = self._requests.get(request_id)
        if request is None or request.attempt is not attempt:
            return None
        if isinstance(letter, SequenceOutput):
            self._hear(request, letter)
        elif isinstance(letter, EngineDeadError):
            self._run_again(request, letter)
        elif isinstance(letter, Exception):
            self._drop(request)
            return letter
        return None

    def _give_up(self, request: _Request) -> None:
        """Forget a request wherever it is."""
        if request.delivery is not None:
            request.delivery.session.send(Abort(request.delivery.mailbox.address))
            self._leave(request)
        elif request in self._backlog:
            self._backlog.remove(request)

    def _send(self, request: _Request) -> None:
        accepted = request.accepted.request
        request_id = accepted.request_id
        prompt, salt, source = list(accepted.prompt_token_ids), accepted.cache_salt, request.accepted.adapter_source
        attempt = request.attempt = object()

        def put(letter: object) -> None:
            self._news.put((attempt, request_id, letter))
            self._has_news.set()

        def mailbox(address: str) -> DirectMailbox:
            return DirectMailbox(address, put)

        deliver = self._client.deliver(prompt, (salt, source), accepted.num_sequences, mailbox)
        delivery = request.delivery = request.place.enter_context(deliver)
        params = replace(request.accepted.params, seed=accepted.seed)
        delivery.session.send(Generate(delivery.mailbox.address, prompt, params, accepted.priority, salt, source))
        self._num_in_work += 1

    def _hear(self, request: _Request, output: SequenceOutput) -> None:
        """Take in what an engine gave a sequence, but for what was heard before."""
        assert request.delivery is not None
        request.delivery.begin()
        index, token_ids = output.index, output.new_token_ids
        if index in request.ended:
            return
        heard, given = request.num_heard.get(index, 0), request.num_given.get(index, 0)
        num_again = min(max(0, heard - given), len(token_ids))
        request.num_given[index] = given + len(token_ids)
        request.num_heard[index] = heard + len(token_ids) - num_again
        is_end = output.finish_reason is not None
        if is_end or num_again < len(token_ids):
            news = replace(
                output,
                request_id=request.accepted.request.request_id,
                new_token_ids=token_ids[num_again:],
                scores=output.scores and output.scores[num_again:],
                prompt_scores=None if heard else output.prompt_scores,
            )
            self.outbox.append(news)
        if is_end:
            request.ended.add(index)
            if len(request.ended) == request.accepted.params.n:
                self._drop(request)

    def _run_again(self, request: _Request, error: EngineDeadError) -> None:
        """Its engine has died."""
        self._leave(request)
        request.num_deaths += 1
        request.num_given.clear()
        if request.num_deaths < MOST_DEATHS:
            self._backlog.appendleft(request)
            return
        request_id = request.accepted.request.request_id
        del self._requests[request_id]
        for index in set(range(request.accepted.params.n)) - request.ended:
            self.outbox.append(SequenceOutput(request_id, index, [], "error", error=str(error)))

    def _drop(self, request: _Request) -> None:
        del self._requests[request.accepted.request.request_id]
        self._leave(request)

    def _leave(self, request: _Request) -> None:
        request.attempt = None
        request.place.close()
        request.delivery = None
        self._num_in_work -= 1


def replicated_engine(load: Load, num_replicas: int, tokenizer: Tokenizer | None) -> ReplicatedEngine:
    """So many engines, loaded as `load` says. Raises `ModelError`, `EngineDeadError`."""
    launches = Launches(load, num_replicas)
    client = EngineClient(launches.connects, launches.after, num_slots=load.config.max_num_seqs)
    return ReplicatedEngine(client, load.config, tokenizer)


def _end(client: EngineClient) -> None:
    for session in client.stop():
        session.join()
