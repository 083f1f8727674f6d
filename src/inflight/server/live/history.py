"""`LoadHistory`: the last hour in intervals of ten seconds. An observer of the server's requests, which runs for every
step of every request and so must be cheap.

`simulate_recording`: simulates the recorded minutes with other settings.

`inflight simulate` runs in separate processes, with a low priority: a simulation is pure Python, and must not delay the
server's event loop or the engines.
"""

import asyncio
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from math import log
from pathlib import Path
from typing import Any

from inflight.contracts.api.outputs import RequestOutput
from inflight.contracts.api.params import SamplingParams
from inflight.server.serving.observer import EndReason, RequestObserver
from inflight.server.wire.api_errors import ApiError

SECONDS = 120.0
"""Seconds after which a simulation is cancelled."""

NICENESS = 10
"""The processes' niceness: beside busy engines they get a tenth of a core. With a higher one they would get almost
none."""


async def simulate_recording(recording: Path, options: list[str]) -> dict[str, Any]:
    """The report of `inflight simulate --trace RECORDING` with further options.

    Raises `ApiError`: it failed (400, with its message) or took too long (504).
    """
    arguments = ["-m", "inflight", "simulate", "--trace", str(recording), "--json", *options]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=pipe, stderr=pipe)
    if hasattr(os, "setpriority"):
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
    try:
        async with asyncio.timeout(SECONDS):
            out, err = await process.communicate()
    except TimeoutError:
        raise ApiError(504, f"the simulation took longer than {SECONDS:g} seconds", code="timeout") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        said = err.decode(errors="replace").strip().rpartition("\n")[2].removeprefix("inflight: ")
        raise ApiError(400, f"the recorded minutes cannot be simulated so: {said}", code="not_simulated")
    report: dict[str, Any] = json.loads(out)
    return report


SECONDS = 10
NUM_PIECES = 360
PERCENTILES = (0.5, 0.9, 0.99)


SHORTEST = 1e-5
"""Seconds; the first class has all shorter durations."""

GROWTH = log(1.1)
NUM_CLASSES = 200
"""The last class begins at half an hour."""


class Latencies:
    """A histogram of durations for percentiles; each class is a tenth wider than the one before, so a percentile is
    accurate to 5 %."""

    __slots__ = ("_counts", "number")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.number = 0

    def count(self, seconds: float, number: int = 1) -> None:
        """Count a duration `number` times."""
        place = min(int(log(seconds / SHORTEST) / GROWTH), NUM_CLASSES - 1) if seconds > SHORTEST else 0
        self._counts[place] = self._counts.get(place, 0) + number
        self.number += number

    def add(self, other: "Latencies") -> None:
        """Add another's counts."""
        for place, number in other._counts.items():
            self._counts[place] = self._counts.get(place, 0) + number
        self.number += other.number

    def percentile(self, share: float) -> float | None:
        """The percentile of this share, in seconds; None: no durations."""
        left = share * self.number
        for place in sorted(self._counts):
            left -= self._counts[place]
            if left <= 0:
                return float(SHORTEST * 1.1 ** (place + 0.5))
        return None


@dataclass(slots=True)
class Piece:
    """Ten seconds.

    Attributes:
        number: its place since the clock began.
        most_running: the most concurrent requests.
        num_failed: requests that ended in an error or timed out.
        to_first_token, between_tokens: of tokens in these seconds.
    """

    number: int
    most_running: int = 0
    num_started: int = 0
    num_ended: int = 0
    num_failed: int = 0
    num_aborted: int = 0
    num_refused: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    to_first_token: Latencies = field(default_factory=Latencies)
    between_tokens: Latencies = field(default_factory=Latencies)


LATENCIES = ("to_first_token", "between_tokens")
COUNTS = tuple(each.name for each in fields(Piece) if each.name not in ("number", *LATENCIES))


class LoadHistory(RequestObserver):
    """The last hour.

    Args:
        clock: seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running: dict[str, tuple[float, float, int]] = {}  # start, time of the last token (0: none), sequences
        self._pieces: deque[Piece] = deque([Piece(int(clock() // SECONDS))], maxlen=NUM_PIECES)

    def started(self, request_id: str, num_sequences: int, params: SamplingParams, adapter: str | None = None) -> None:
        """A request is about to be sent to the engine."""
        now = self._clock()
        self._running[request_id] = now, 0.0, num_sequences
        piece = self._piece(now)
        piece.num_started += 1
        piece.most_running = max(piece.most_running, len(self._running))

    def produced(self, request_id: str, num_new_tokens: int, now: float) -> None:
        """Count new tokens; those of several sequences count as if at an equal pace."""
        known = self._running.get(request_id)
        if known is None:
            return
        start, last, num_sequences = known
        piece = self._pieces[-1] if self._pieces[-1].number == now // SECONDS else self._piece(now)
        piece.num_output_tokens += num_new_tokens
        if last:
            piece.between_tokens.count((now - last) * num_sequences / num_new_tokens, num_new_tokens)
        else:
            piece.to_first_token.count(now - start)
        self._running[request_id] = start, now, num_sequences

    def finished(self, request_id: str, output: RequestOutput | None, reason: EndReason) -> None:
        """A request has ended."""
        self._running.pop(request_id, None)
        piece = self._piece(self._clock())
        if output is not None:
            piece.num_prompt_tokens += len(output.prompt_token_ids)
        match reason:
            case "stop" | "length":
                piece.num_ended += 1
            case "abort":
                piece.num_aborted += 1
            case "refused":
                piece.num_refused += 1
            case _:
                piece.num_failed += 1

    def recent(self) -> dict[str, list[float | None]]:
        """Percentiles of the current and the previous interval, in seconds; None: no tokens."""
        now = self._clock() // SECONDS
        return _of([piece for piece in list(self._pieces)[-2:] if piece.number >= now - 1])

    def as_dict(self) -> dict[str, Any]:
        """The whole hour by columns, one value for each piece; percentiles are None where nothing came.

        `age` is how many seconds ago each piece began; pieces in which nothing happened are left out.
        """
        now, pieces = self._clock(), list(self._pieces)
        columns: dict[str, Any] = {name: [getattr(piece, name) for piece in pieces] for name in COUNTS}
        for name in LATENCIES:
            columns[name] = [_percentiles(getattr(piece, name)) for piece in pieces]
        age = [now - piece.number * SECONDS for piece in pieces]
        return {"seconds": SECONDS, "age": age, **columns, "whole": _of(pieces)}

    def _piece(self, now: float) -> Piece:
        """The piece of this time; what is late belongs to the newest."""
        number = int(now // SECONDS)
        if self._pieces[-1].number < number:
            piece = Piece(number)
            piece.most_running = len(self._running)
            self._pieces.append(piece)
            while self._pieces[0].number <= number - NUM_PIECES:
                self._pieces.popleft()
        return self._pieces[-1]


def _of(pieces: Sequence[Piece]) -> dict[str, list[float | None]]:
    """The percentiles of some pieces together."""
    totals: dict[str, Latencies] = {name: Latencies() for name in LATENCIES}
    for piece in pieces:
        for name, total in totals.items():
            total.add(getattr(piece, name))
    return {name: _percentiles(total) for name, total in totals.items()}


def _percentiles(latencies: Latencies) -> list[float | None]:
    return [latencies.percentile(share) for share in PERCENTILES]
