"""`ResponseStore`: keeps responses for a while, so that clients can retrieve them and continue conversations.

The least recently used are dropped once there are too many or they take too much memory. They are in this process's
memory only.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from inflight.server.responses.request import Chat

MAX_NUM_RESPONSES = 10_000
MAX_BYTES = 2**26

_BYTES_EACH = 1000
"""Approximate bytes of a message or a response besides its text."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A stored response.

    Attributes:
        answer: the response as it was sent, in JSON.
        chat: the conversation including this answer, without instructions. (It has all earlier messages, so it can be
            continued after earlier responses are dropped.)
        num_bytes: its approximate memory.
    """

    answer: bytes
    chat: Chat
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        texts = sum(4 * len(str(message)) + _BYTES_EACH for message in self.chat)
        object.__setattr__(self, "num_bytes", len(self.answer) + texts + _BYTES_EACH)


class ResponseStore:
    """Responses by id.

    Args:
        max_num_responses: most responses that are kept.
        max_bytes: their approximate total memory.
    """

    def __init__(self, max_num_responses: int = MAX_NUM_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_num_responses = max_num_responses
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()

    def put(self, response_id: str, response: StoredResponse) -> None:
        """Store a response unless it is too large, dropping others if necessary."""
        if response.num_bytes > self._max_bytes:
            return
        self._responses[response_id] = response
        self._num_bytes += response.num_bytes
        while len(self._responses) > self._max_num_responses or self._num_bytes > self._max_bytes:
            self._num_bytes -= self._responses.popitem(last=False)[1].num_bytes

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a response, if it is still stored, and mark it as recently used."""
        if response_id in self._responses:
            self._responses.move_to_end(response_id)
        return self._responses.get(response_id)

    def delete(self, response_id: str) -> bool:
        """Drop a response; return whether it was stored."""
        response = self._responses.pop(response_id, None)
        if response is None:
            return False
        self._num_bytes -= response.num_bytes
        return True
