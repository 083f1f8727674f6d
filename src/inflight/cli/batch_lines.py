"""Requests of OpenAI's batch files in `inflight generate`, answered by the server's own code."""

import asyncio
import json
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from inflight.cli.prompts import PromptLine
from inflight.host.garbage_collection import freeze_loaded_objects

if TYPE_CHECKING:
    from inflight.entrypoints.async_llm import AsyncLLM

MOST_IN_FLIGHT = 1000
"""Requests read and tokenized ahead: enough to fill the engine's slots."""


async def answer(llm: "AsyncLLM", lines: Sequence[PromptLine], take: Callable[[int, dict[str, Any]], None]) -> None:
    """Send all lines' bodies to their endpoints, and call `take` with the number of each line and its line of OpenAI's
    output, in the order in which they end. Then the engine is stopped.

    A refused request gets the server's answer, with a status of 400 or more. Every model name in the file means the
    loaded one. Raises `ModelError`.
    """
    from inflight.server.app import create_app
    from inflight.server.batches.answering import AppAnswerer
    from inflight.server.serving.settings import ANY_NAME, ServerSettings

    names = (name for line in lines if isinstance(name := (line.body or {}).get("model"), str) and name)
    app = create_app(llm, ServerSettings(model_name=next(names, "inflight"), model_aliases=(ANY_NAME,)))
    answerer, waiting = AppAnswerer(app, llm), iter(enumerate(lines))

    async def work() -> None:
        for number, line in waiting:
            status, body = await answerer.answer(line.url or "", json.dumps(line.body).encode())
            response = {"status_code": status, "request_id": uuid.uuid4().hex, "body": json.loads(body or "null")}
            line_id = f"batch_req_{uuid.uuid4().hex}"
            take(number, {"id": line_id, "custom_id": line.custom_id, "response": response, "error": None})

    async with app.router.lifespan_context(app):
        await llm.start()
        freeze_loaded_objects()
        await asyncio.gather(*(work() for _ in range(min(MOST_IN_FLIGHT, len(lines)))))
