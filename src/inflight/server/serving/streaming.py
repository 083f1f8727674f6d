"""`stream`: sends a generation as a stream of events, all events of one step in one write."""

from collections.abc import Callable, Sequence
from typing import Protocol

from inflight.contracts.outputs import RequestOutput, TextDelta
from inflight.server.serving.event_stream import EventStream, Write
from inflight.server.serving.generation import Generation, generate
from inflight.server.serving.service import Service
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.client import Client


class Events(Protocol):
    """Turns one answer into events."""

    def of(self, deltas: list[TextDelta]) -> bytes:
        """Return the events for these deltas; empty if they add nothing that can be shown yet."""

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Return the last events."""


def stream(
    service: Service, generation: Generation, events: Events, error_event: Callable[[ApiError], bytes] | None = None
) -> EventStream:
    """Return a response that runs `generation` and streams its events; later errors are handled as in `EventStream`."""

    async def run(client: Client, write: Write) -> None:
        async def deliver(deltas: list[TextDelta]) -> None:
            if news := events.of(deltas):
                await write(news)

        await write(events.end(await generate(service, generation, client, deliver)))

    return EventStream(run, service.settings, error_event)
