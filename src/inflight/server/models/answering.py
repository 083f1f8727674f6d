"""`PoolAnswerer`: answers requests of batch jobs, each by the model that it names."""

from inflight.contracts.errors import ModelError
from inflight.server.batches.answering import AppAnswerer
from inflight.server.models.choice import chosen, read_choice
from inflight.server.models.loading import ServedModel
from inflight.server.models.pool import ModelPool, UnavailableError
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.off_loop import off_loop

FAILED = 500
"""The status for a request whose model could not be loaded for it: it is not tried again, as it is after a 503."""


class PoolAnswerer:
    """See `batches.worker.Answerer`."""

    def __init__(self, pool: ModelPool[ServedModel]) -> None:
        self._pool = pool

    async def wait_until_ready(self) -> None:
        """Return at once: each request waits for its own model."""

    async def answer(self, url: str, body: bytes) -> tuple[int, bytes]:
        """See `AppAnswerer.answer`."""
        try:
            name, _ = await off_loop(len(body), lambda: read_choice(body))
            with self._pool.use(chosen(self._pool, name)) as use:
                model = await use.model()
                return await AppAnswerer(model.background, model.llm).answer(url, body)
        except ApiError as error:
            return error.status, error.envelope()
        except ModelError as error:
            answer = ApiError.of(error)
            return answer.status if isinstance(error, UnavailableError) else FAILED, answer.envelope()
