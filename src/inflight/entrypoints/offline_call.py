"""`OfflineCall`: runs the requests of one synchronous call on a client's engines.

With one engine all are sent at once. With several they are sent as slots become free, so that none waits at a busy
engine while another is idle. Requests of a dead engine run again elsewhere: since they give the same tokens everywhere,
tokens already received are skipped.
"""

import threading
import time
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

from inflight.contracts.api.errors import EngineDeadError
from inflight.contracts.api.outputs import SequenceOutput, merged
from inflight.contracts.step.block_hash import Root
from inflight.engine.admission import AcceptedRequest
from inflight.engine.client import EngineClient
from inflight.engine.process.protocol import Abort, Generate, GenerateMany
from inflight.engine.process.session import Mail, Mailbox, Session
from inflight.host.garbage_collection import call_soon

IN_WORK_FOR_EACH_SLOT = 2
"""Requests queued per engine beyond its slots, so that a freed slot is filled at once."""
MOST_DEATHS = 2
"""After this many crashes of its engine, a request ends with an error."""


SECONDS_BETWEEN = 0.1
"""Seconds between outputs for a caller who does not stream, to draw a progress bar, for example."""


class RefusedRequestError(Exception):
    """An engine refused a request; `__cause__` says why.

    Attributes:
        request_id: of the request.
    """

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id


@dataclass(slots=True, eq=False)
class _Request:
    """An unfinished request.

    Attributes:
        num_received: by sequence, how many tokens the caller has.
        num_given: by sequence, how many tokens the current engine has given.
        ended: the sequences whose end the caller has received.
        place: closed when the request ends or moves.
    """

    accepted: AcceptedRequest
    num_received: dict[int, int] = field(default_factory=dict)
    num_given: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    num_deaths: int = 0
    place: ExitStack = field(default_factory=ExitStack)
    mailbox: Mailbox | None = None


class OfflineCall:
    """Used by one thread and sharing nothing, so an exception in that thread, wherever raised, harms no other.

    Args:
        requests: the requests; their ids differ.
        num_slots: how many sequences each engine runs at once.
        streams: whether the caller wants each token at once. If not, it is woken only by first tokens, ends of
            sequences, and ten times a second, because it competes with the engine for the GIL.
    """

    def __init__(
        self, client: EngineClient, requests: Iterable[AcceptedRequest], num_slots: int, *, streams: bool = True
    ) -> None:
        self._client = client
        self._requests = {each.request.request_id: _Request(each) for each in requests}
        self._backlog = deque(self._requests.values())
        self._num_slots = num_slots
        self._num_in_work = 0
        self._at: dict[Mailbox, _Request] = {}
        self._mail: SimpleQueue[Mail] = SimpleQueue()
        self._take = self._mail.put if streams else self._gather
        self._lock = threading.Lock()
        self._held: dict[tuple[Mailbox, int], list[SequenceOutput]] = {}
        """Outputs of unfinished sequences not yet given to the caller."""
        self._due = 0.0

    def outputs(self) -> Generator[tuple[str, SequenceOutput], None, None]:
        """Run the requests, and yield their outputs, each with the request's id, until all have ended. Closing this
        early aborts the rest.

        Raises:
            RefusedRequestError: a request cannot be run.
            EngineGivenUpError: all engines have died too often.
        """
        try:
            while self._requests:
                self._send_backlog()
                for mailbox, letter in self._mail.get():
                    if (request := self._at.get(mailbox)) is not None:
                        request_id = request.accepted.request.request_id
                        for output in self._take_in(request, letter):
                            yield request_id, output
        finally:
            self._abort()

    # ------------------------------------------------------------------------------------- to the engines

    def _send_backlog(self) -> None:
        """Send requests while there is room. Dead engines restart meanwhile."""
        while self._backlog:
            self._client.start().result()
            commands: dict[Session, list[Generate]] = {}
            try:
                while self._backlog and self._has_room():
                    session, command = self._deliver(self._backlog[0])
                    self._backlog.popleft()
                    commands.setdefault(session, []).append(command)
            except EngineDeadError:
                pass  # the next round restarts it
            for session, of_session in commands.items():
                session.send(GenerateMany(of_session))
            if not self._has_room():
                return

    def _has_room(self) -> bool:
        num_running = len(self._client.sessions())
        if self._client.num_replicas == 1:
            return True
        return self._num_in_work < max(1, IN_WORK_FOR_EACH_SLOT * self._num_slots * num_running)

    def _deliver(self, request: _Request) -> tuple[Session, Generate]:
        """Choose an engine for a request. Returns it, with the command to send."""
        accepted = request.accepted.request
        prompt, salt, source = list(accepted.prompt_token_ids), accepted.cache_salt, request.accepted.adapter_source
        deliver = self._client.deliver(prompt, Root(salt, adapter=source), accepted.num_sequences, self._take)
        request.mailbox = request.place.enter_context(deliver)
        self._at[request.mailbox] = request
        self._num_in_work += 1
        params = replace(request.accepted.params, seed=accepted.seed)
        deadline, text = request.accepted.deadline, accepted.text
        command = Generate(
            request.mailbox.address,
            prompt,
            params,
            accepted.priority,
            salt,
            source,
            deadline,
            text,
            accepted.multimodal,
        )
        return request.mailbox.session, command

    def _abort(self) -> None:
        """Abort unfinished requests. The garbage collector may call this at any point of any thread: so it takes no
        lock, and leaves the rest to a dedicated thread."""
        for request in self._requests.values():
            if request.mailbox is not None:
                request.mailbox.session.send(Abort(request.mailbox.address))
                call_soon(request.place.close)
        self._requests.clear()

    # ------------------------------------------------------------------------------------- from the engines

    def _gather(self, mail: Mail) -> None:
        """Buffer outputs that the caller does not need yet. Runs in the threads that listen to engines."""
        ready: Mail = []
        with self._lock:
            for mailbox, letter in mail:
                held = None
                if isinstance(letter, SequenceOutput):
                    held = self._held.get((mailbox, letter.index))
                    if letter.finish_reason is not None:
                        self._held.pop((mailbox, letter.index), None)
                    elif held is None:
                        self._held[mailbox, letter.index] = []
                    else:
                        held.append(letter)
                        continue
                ready.append((mailbox, merged([*held, letter]) if held else letter))
            if (now := time.monotonic()) >= self._due:
                self._due = now + SECONDS_BETWEEN
                for (mailbox, _), held in self._held.items():
                    if held:
                        ready.append((mailbox, merged(held)))
                        held.clear()
        if ready:
            self._mail.put(ready)

    def _take_in(self, request: _Request, letter: object) -> Iterable[SequenceOutput]:
        """Process a message about a request. Returns new outputs for the caller."""
        if isinstance(letter, SequenceOutput):
            return self._receive(request, letter)
        self._leave(request)
        if isinstance(letter, EngineDeadError):
            return self._run_again(request, letter)
        assert isinstance(letter, Exception)
        raise RefusedRequestError(request.accepted.request.request_id) from letter

    def _receive(self, request: _Request, output: SequenceOutput) -> Iterable[SequenceOutput]:
        """Take in what an engine gave a sequence, but for what was received before."""
        assert request.mailbox is not None
        request.mailbox.begin()
        index, token_ids = output.index, output.new_token_ids
        if index in request.ended:
            return ()
        received, given = request.num_received.get(index, 0), request.num_given.get(index, 0)
        num_again = min(max(0, received - given), len(token_ids))
        request.num_given[index] = given + len(token_ids)
        request.num_received[index] = received + len(token_ids) - num_again
        is_end = output.finish_reason is not None
        if is_end:
            request.ended.add(index)
            if len(request.ended) == request.accepted.params.n:
                del self._requests[request.accepted.request.request_id]
                self._leave(request)
        if request.num_deaths == 0:
            return (output,)
        if num_again == len(token_ids) and not is_end:
            return ()
        new = token_ids[num_again:]
        scores, prompt_scores = output.scores and output.scores[num_again:], None if received else output.prompt_scores
        return (replace(output, new_token_ids=new, scores=scores, prompt_scores=prompt_scores),)

    def _run_again(self, request: _Request, error: EngineDeadError) -> Iterable[SequenceOutput]:
        """Handle the death of its engine."""
        request.num_deaths += 1
        request.num_given.clear()
        if request.num_deaths < MOST_DEATHS:
            self._backlog.append(request)
            return ()
        request_id, num_sequences = request.accepted.request.request_id, request.accepted.params.n
        del self._requests[request_id]
        unfinished = sorted(set(range(num_sequences)) - request.ended)
        return [SequenceOutput(request_id, index, [], "error", error=str(error)) for index in unfinished]

    def _leave(self, request: _Request) -> None:
        """It is at no engine any more."""
        assert request.mailbox is not None
        del self._at[request.mailbox]
        request.mailbox = None
        request.place.close()
        self._num_in_work -= 1
