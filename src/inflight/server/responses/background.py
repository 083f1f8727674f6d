"""`BackgroundRun`: a response that runs when its request has been answered, whether or not the client stays."""

import asyncio
from typing import Any

from inflight.contracts.api.outputs import TextDelta
from inflight.server.responses.answer import ResponseAnswer, failed, response_of
from inflight.server.responses.store import ResponseStore, StoredResponse
from inflight.server.serving.generation import generate, size_of_answer
from inflight.server.serving.service import Service
from inflight.server.serving.streams import attended
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.json_route import to_json
from inflight.server.wire.off_loop import off_loop


class BackgroundRun:
    """A running response. It is in `ResponseStore.running` until it is stored: finished, failed or cancelled.

    Attributes:
        task: ends when the response is stored.
    """

    def __init__(self, answer: ResponseAnswer, service: Service, store: ResponseStore) -> None:
        self._answer, self._service, self._store, self._status = answer, service, store, "queued"
        store.running[answer.generation.request_id] = self
        self.task = asyncio.create_task(self._run())

    def shown(self) -> bytes:
        """The response as it is now, in JSON."""
        return to_json(response_of(self._answer, self._status))

    async def _run(self) -> None:
        answer = self._answer

        async def begin(_: list[TextDelta]) -> None:
            self._status = "in_progress"

        end: dict[str, Any] | None = None
        try:
            never = asyncio.Event().wait  # whatever becomes of the client
            async with attended(never, self._service.settings.request_timeout) as client:  # type: ignore[arg-type]
                (output,) = await generate(self._service, answer.generation, client, begin)
                await off_loop(size_of_answer([output]), lambda: answer.whole(output))
            answer.keep()
            answer.expect_next(self._service, output)
        except asyncio.CancelledError:
            end = response_of(answer, "cancelled")
        except Exception as error:
            end = failed(answer, ApiError.from_exception(error))
        finally:
            del self._store.running[answer.generation.request_id]
        if end is not None:
            self._store.put(answer.generation.request_id, StoredResponse(to_json(end), ()))
