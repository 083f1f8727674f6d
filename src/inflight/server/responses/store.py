"""`ResponseStore`: responses that are kept for a while, so that they can be got, and conversations gone on with.

Decides which are dropped: those that nobody has asked for the longest, as soon as there are too many or they take too
much memory. They are kept in this process and end with it. Knows nothing of what is in them.
"""

from collections import OrderedDict
from dataclasses import dataclass

from inflight.server.responses.request import Chat

MAX_NUM_RESPONSES = 10_000
MAX_BYTES = 2**26

_BYTES_EACH = 1000
"""What a message or a response takes beside its text, about."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response.

    Attributes:
        answer: as it was answered, in JSON.
        chat: the conversation with its answer, without instructions. (It has all earlier messages, too; so it can be
            gone on with when the responses before it are gone.)
    """

    answer: bytes
    chat: Chat

    @property
    def num_bytes(self) -> int:
        """About how much memory it takes."""
        texts = sum(4 * len(str(message)) + _BYTES_EACH for message in self.chat)
        return len(self.answer) + texts + _BYTES_EACH


class ResponseStore:
    """Responses by id.

    Args:
        max_num_responses: most that are kept.
        max_bytes: about how much memory they may take, all together.
    """

    def __init__(self, max_num_responses: int = MAX_NUM_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_num_responses = max_num_responses
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()

    def put(self, response_id: str, response: StoredResponse) -> None:
        """Keep one, if it is not too large for that; others may have to go for it."""
        if response.num_bytes > self._max_bytes:
            return
        self._responses[response_id] = response
        self._num_bytes += response.num_bytes
        while len(self._responses) > self._max_num_responses or self._num_bytes > self._max_bytes:
            self._num_bytes -= self._responses.popitem(last=False)[1].num_bytes

    def get(self, response_id: str) -> StoredResponse | None:
        """One, if it is still there; it is kept longer for having been asked for."""
        if response_id in self._responses:
            self._responses.move_to_end(response_id)
        return self._responses.get(response_id)

    def delete(self, response_id: str) -> bool:
        """Drop one; whether it was there."""
        response = self._responses.pop(response_id, None)
        if response is None:
            return False
        self._num_bytes -= response.num_bytes
        return True
