"""`SearchBudget`: bounds the time that the patterns of a checkpoint take on one answer.

A response template may have a pattern whose time grows exponentially with the text. Reading runs on the event loop, so
the bound is what one such answer may cost all other requests. (`regex` releases the interpreter's lock meanwhile.)
"""

from collections.abc import Callable, Iterator
from time import thread_time
from typing import Any

from inflight.server.wire.api_errors import ApiError

MOST_SECONDS = 0.2
"""Of an answer's slow searches together. (`regex` counts the processor time of all threads of the process.)"""

FREE_SECONDS = 0.001
"""So much of each search does not count: usual ones take microseconds, and a long answer needs many."""


class SearchBudget:
    """The time that is left for one answer."""

    def __init__(self) -> None:
        self._left = MOST_SECONDS

    def search(self, field: str, find: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return what a method of a compiled pattern returns; all matches of one that finds several.

        Args:
            field: where in the response template the pattern stands.

        Raises ApiError when the time is over.
        """
        begin = thread_time()
        try:
            found = find(*args, **options, timeout=max(self._left, FREE_SECONDS))
            return list(found) if isinstance(found, Iterator) else found
        except TimeoutError as error:
            message = f"a pattern of {field!r} in this model's response template takes too long to read this answer"
            raise ApiError(500, message, code="slow_response_template") from error
        finally:
            self._left -= max(thread_time() - begin - FREE_SECONDS, 0)
