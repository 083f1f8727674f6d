"""`Deadlines`: finds requests that have run out of time. Callers pass the time; there is no clock here."""

import heapq


class Deadlines:
    """Requests with a deadline. A request that has ended before its deadline is still reported as due."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def add(self, request_id: str, deadline: float) -> None:
        """Set a request's deadline."""
        heapq.heappush(self._heap, (deadline, request_id))

    def due(self, now: float) -> list[str]:
        """The requests whose deadline has passed, each once."""
        ids = []
        while self._heap and self._heap[0][0] <= now:
            ids.append(heapq.heappop(self._heap)[1])
        return ids
