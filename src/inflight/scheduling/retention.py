"""`Retention`: keeps the cached blocks of sessions that will probably return soon.

A *session* is a chain of requests whose prompts each continue the one before: an agent that sends its history again
with the results of its tools. While a tool runs, nothing refers to the session's blocks, and by recency alone a few
other long prompts would evict them. From a session's second request on they are kept for a while, in which requests
that would need them wait. (Most requests come only once: others must not wait for them.)

How long follows from what the session would lose and from how long it was away before. Keeping blocks for `t` seconds
saves `gain` seconds if the session returns by then, and costs others up to `t` (Continuum, arXiv 2511.02230). The gain
is the time to compute its tokens again, and to wait for blocks as other requests do. Its own pauses count; while it has
few, those of all sessions; and while they are few, blocks are kept for as long as the gain.

Kept blocks are bounded in number and in time, are used last but before a sequence is preempted, and are never kept from
a request of better priority. Sessions that began earlier go first: the last one loses its blocks when some are needed,
so that the others can end. Owns no block. Pure but for the clock that it is given.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from inflight.contracts.step.block_hash import block_hashes
from inflight.scheduling.block_pool import BlockPool
from inflight.scheduling.prefix_cache import PrefixNode, hash_of
from inflight.scheduling.sequence import Request, Sequence

OPENING, OPENING_SHARE = 64, 1 / 8
"""A chat's prompt ends with the opening of the answer (a mark, empty thoughts), which the next prompt may not repeat.
So the last tokens of a prompt do not identify its session: `OPENING` tokens, or this share of a short prompt."""

LARGEST_SHARE = 0.9
"""The most of the cache that kept blocks may be."""

LEAST_SECONDS = 0.2
"""Sessions whose tokens take less time to compute are not followed."""

LEAST_LEFT = 0.75
"""A session of which less is left is served like a new one, lest sessions take each other's blocks in turn."""

PATIENCE = 8.0
"""A request waits for kept blocks at most this many times as long as computing it takes, if that is longer."""

GIVEN_UP_TOGETHER = 64
"""Blocks that are kept no longer when one is needed."""

MAX_SESSIONS = 256
MAX_PAUSES = 32
ENOUGH_PAUSES = 5
"""The fewest pauses that count: a session's own, or else those of all."""

SLACK = 1.25
"""The next pause may be longer than those that were seen."""

SMOOTHING = 0.2
"""Weight of the newest measurement in a running average."""


def seconds_to_keep(pauses: Iterable[float], gain: float) -> float:
    """Return the time for which keeping blocks pays most: 0, or one of the pauses.

    Args:
        pauses: of earlier requests, in seconds; one that has never ended is infinite. One more of them is assumed.
        gain: the seconds that are saved if the session returns in time.
    """
    in_order = sorted(pauses)
    best, best_seconds, passed = 0.0, 0.0, 0.0
    for number, pause in enumerate(in_order, 1):
        if pause == inf:
            break
        passed += pause
        value = number * gain - passed - (len(in_order) + 1 - number) * pause
        if value > best:
            best, best_seconds = value, pause
    return best_seconds


@dataclass(slots=True, eq=False)
class Session:
    """A chain of requests.

    Attributes:
        number: sessions that began later have higher ones.
        key: the block hash of its last request's prompt, without the opening of the answer.
        ended: when that request did.
        priority: of that request.
        pauses: the seconds between its requests.
        kept_until: when its blocks are kept no longer.
        blocks: the kept blocks, and how often each had been taken.
    """

    number: int
    key: bytes = b""
    ended: float = 0.0
    priority: int = 0
    pauses: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_PAUSES))
    kept_until: float = 0.0
    blocks: dict[int, int] = field(default_factory=dict)


class Retention:
    """Follows the sessions of one scheduler.

    Args:
        block_pool: the cache's blocks.
        most_seconds: the longest time for which blocks are kept, and for which a request that takes little time to
            compute waits for kept ones.
        clock: the time in seconds.
    """

    def __init__(self, block_pool: BlockPool, most_seconds: float, clock: Callable[[], float]) -> None:
        self._pool, self._most_seconds, self._clock = block_pool, most_seconds, clock
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()  # away; the first has been so for longest
        self._returned: dict[str, Session] = {}  # by the request that continues it
        self._arrived: dict[str, float] = {}  # of requests that wait to start
        self._keeping: list[Session] = []
        self._pauses: deque[float] = deque(maxlen=2 * MAX_PAUSES)  # of all sessions
        self._wait = 0.0  # seconds that requests waited for their start lately
        self._seconds_per_token: float | None = None
        self._num_sessions = 0
        block_pool.give_up_kept = self._give_up

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step of mostly prefill took this time."""
        per_token = seconds / num_tokens
        known = per_token if self._seconds_per_token is None else self._seconds_per_token
        self._seconds_per_token = known + SMOOTHING * (per_token - known)

    # ------------------------------------------------------------------------------------- requests

    def arrived(self, sequence: Sequence) -> None:
        """The first sequence of a request was submitted."""
        request, now = sequence.request, self._clock()
        self._arrived[request.request_id] = now
        found = None
        if self._sessions:
            hashes = block_hashes(request.prompt_token_ids, self._pool.block_size, sequence.root)
            found = next((each for each in reversed(list(hashes)) if each in self._sessions), None)
        if found is not None:
            session = self._returned[request.request_id] = self._sessions.pop(found)
            session.pauses.append(now - session.ended)
            self._pauses.append(now - session.ended)

    def started(self, request: Request) -> None:
        """A sequence of a request has taken its slot, and all cached blocks of its prompt."""
        if (arrived := self._arrived.pop(request.request_id, None)) is None:
            return
        if (session := self._returned.get(request.request_id)) is not None:
            self._release(session)
        else:
            self._wait += SMOOTHING * (self._clock() - arrived - self._wait)

    def ended(self, sequence: Sequence) -> None:
        """A sequence has ended, and still has its blocks. Keep them, if that pays."""
        request = sequence.request
        if sequence.index > 0:
            return
        self._arrived.pop(request.request_id, None)
        session = self._returned.pop(request.request_id, None) or self._new_session()
        if sequence.finish_reason in ("abort", "error"):
            if session.key:  # the client may try again
                session.pauses.pop()
                session.ended = self._clock()
                self._sessions[session.key] = session
            return
        seconds = len(sequence.token_ids) * (self._seconds_per_token or 0.0)
        number, node = sequence.num_known_blocks, sequence.parent
        length = sequence.num_prompt_tokens - min(OPENING, int(OPENING_SHARE * sequence.num_prompt_tokens))
        while number > length // self._pool.block_size and isinstance(node, PrefixNode):
            number, node = number - 1, node.key[0]
        if seconds < LEAST_SECONDS or not isinstance(node, PrefixNode) or request.text is not None:
            return
        session.key, session.ended, session.priority = hash_of(node), self._clock(), request.priority
        if (same := self._sessions.pop(session.key, None)) is not None:
            self._release(same)
        self._sessions[session.key] = session
        if len(self._sessions) > MAX_SESSIONS:
            self._forget_first()
        if not session.pauses:
            return
        gain, known = seconds + self._expected_wait, session.pauses
        if len(known) < ENOUGH_PAUSES:
            known = self._pauses
        longest = SLACK * seconds_to_keep(known, gain) if len(known) >= ENOUGH_PAUSES else gain
        self._keep(session, sequence, min(longest, self._most_seconds))

    @property
    def _expected_wait(self) -> float:
        """How long a request probably waits for its start, if its blocks are not kept."""
        waiting = (arrived for each, arrived in self._arrived.items() if each not in self._returned)
        return max(self._wait, self._clock() - min(waiting, default=inf))

    def _keep(self, session: Session, sequence: Sequence, seconds: float) -> None:
        """Keep the first blocks of a session, as many as may be kept."""
        if seconds == 0:
            return
        room = int(LARGEST_SHARE * self._pool.num_blocks) - sum(len(each.blocks) for each in self._keeping)
        blocks = (block for row in zip(*sequence.block_tables, strict=True) for block in row)
        known = (block for block in blocks if self._pool.node_of(block) is not None)
        session.blocks = {block: self._pool.num_times_taken(block) for block in islice(known, max(room, 0))}
        session.kept_until = session.ended + seconds
        for block in session.blocks:
            self._pool.keep(block)
        if session.blocks:
            self._keeping.append(session)

    def _release(self, session: Session, most: int | None = None) -> None:
        """Keep a session's blocks no longer, or only the last ones of them: the last are evicted first."""
        if session not in self._keeping:
            return
        for _ in range(len(session.blocks) if most is None else min(most, len(session.blocks))):
            block, number = session.blocks.popitem()
            if self._pool.num_times_taken(block) == number:
                self._pool.unkeep(block)
        if not session.blocks:
            self._keeping.remove(session)

    def _new_session(self) -> Session:
        self._num_sessions += 1
        return Session(self._num_sessions)

    def _give_up(self) -> None:
        """Release the last blocks of the session that began last: others lose nothing, and can end."""
        if self._keeping:
            self._release(max(self._keeping, key=lambda session: session.number), GIVEN_UP_TOGETHER)

    def _forget_first(self) -> None:
        _, session = self._sessions.popitem(last=False)
        self._pauses.append(inf)
        self._release(session)

    # ------------------------------------------------------------------------------------- waiting

    def expire(self) -> None:
        """Forget what has been kept for its time."""
        now = self._clock()
        returned = list(self._returned.values())
        for session in [each for each in self._keeping if each.kept_until <= now and each not in returned]:
            self._release(session)
        while self._sessions and next(iter(self._sessions.values())).ended + self._most_seconds <= now:
            self._forget_first()

    def may_take(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence may take kept blocks."""
        request_id = sequence.request.request_id
        arrived = self._arrived.get(request_id)
        return (
            not self._keeping
            or arrived is None
            or self._clock() - arrived >= self._patience(sequence)
            or self._is_first(sequence)
            or all(sequence.request.priority < session.priority for session in self._keeping)
        )

    def _patience(self, sequence: Sequence) -> float:
        """For how long a request waits for kept blocks."""
        seconds = len(sequence.token_ids) * (self._seconds_per_token or 0.0)
        return max(self._most_seconds, PATIENCE * seconds)

    def _is_first(self, sequence: Sequence) -> bool:
        """Whether a sequence continues a session that began before one whose blocks are kept, or that has kept most of
        its own."""
        session = self._returned.get(sequence.request.request_id)
        if session is None:
            return False
        num_blocks = len(self._pool.layout.groups) * len(sequence.token_ids) // self._pool.block_size
        others = [each.number for each in self._keeping if each is not session]
        has_most = session in self._keeping and len(session.blocks) >= LEAST_LEFT * num_blocks
        return has_most or not others or session.number < max(others)

    def has_returned(self, sequence: Sequence) -> bool:
        """Whether a sequence continues a session."""
        return sequence.request.request_id in self._returned

    @property
    def seconds_left(self) -> float:
        """The time after which a request that waits for kept blocks may start, if nothing else happens."""
        now, ends = self._clock(), [session.kept_until for session in self._keeping]
        ends += [arrived + self._most_seconds for arrived in self._arrived.values()]  # or later: then it is asked again
        return min((end - now for end in ends if end > now), default=1.0)
