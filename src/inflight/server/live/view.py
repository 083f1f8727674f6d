"""`LiveView`: shared state of the live page's endpoints, for one server."""

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inflight.contracts.record import RecordTo
from inflight.engine.replicas.live_states import recording_of
from inflight.entrypoints.async_llm import AsyncLLM
from inflight.server.live.broadcast import Broadcast
from inflight.server.live.history import LoadHistory
from inflight.server.serving.service import RunningRequest

MAX_RECORDED_BYTES = 2**25
"""Bytes of each of two files of steps recorded while a page is open."""


class LiveView:
    """The view of one server.

    Args:
        record_to: where the operator records all steps; None: a temporary folder, while a page is open.
        is_ending: whether the server is about to end.
        shows_texts: whether every client with a key may see prompts and answers.

    Attributes:
        history: must be one of the server's observers.
        broadcast: the messages to pages.
        simulating: held by the one simulation that may run.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        record_to: RecordTo | None = None,
        is_ending: Callable[[], bool] = lambda: False,
        *,
        shows_texts: bool = False,
    ) -> None:
        self._llm = llm
        self.shows_texts = shows_texts
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        to_file: RecordTo | None = None
        if record_to is None:
            self._folder = tempfile.TemporaryDirectory(prefix="inflight-", ignore_cleanup_errors=True)
            record_to = to_file = RecordTo(
                path=str(Path(self._folder.name) / "steps.jsonl"), max_bytes=MAX_RECORDED_BYTES, num_files=2
            )
        self._recorded_in = record_to
        self.records_always = to_file is None
        self.simulating = asyncio.Lock()
        self.history = LoadHistory()
        self.broadcast = Broadcast(llm, self.history, to_file, is_ending)

    def recording(self, engine: int) -> Path:
        """The file with the last recorded steps of an engine."""
        return Path(recording_of(self._recorded_in, engine, self._llm.num_replicas).path)

    def close(self) -> None:
        """Remove the temporary recordings."""
        if self._folder is not None:
            self._folder.cleanup()

    def described(self, request_id: str, running: RunningRequest) -> dict[str, Any]:
        """The visible part of a running request, without texts unless shown."""
        params, now = running.params, time.monotonic()
        first = running.first_token_time
        about: dict[str, Any] = {
            "id": request_id,
            "seconds": now - running.start_time,
            "seconds_to_first_token": None if first is None else first - running.start_time,
            "num_prompt_tokens": len(running.prompt_token_ids),
            "num_output_tokens": running.num_tokens,
            "priority": running.priority,
            "n": params.n,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "seed": params.seed,
            "logprobs": params.logprobs,
            "is_structured": params.structured_output is not None,
        }
        if running.texts is not None and self._llm.tokenizer is not None:
            about["prompt"] = self._llm.tokenizer.decode(list(running.prompt_token_ids))
            about["texts"] = ["".join(pieces) for pieces in running.texts]
        return about
