"""`ThoughtsFirst`: one reader finds the thoughts in a text, another one the calls in what remains."""

from inflight.server.answers.pieces import Piece, Reader


class ThoughtsFirst:
    """Reads one text.

    Args:
        thoughts: finds thoughts and content.
        calls: reads the content.
    """

    def __init__(self, thoughts: Reader, calls: Reader) -> None:
        self._thoughts, self._calls = thoughts, calls

    @property
    def num_calls(self) -> int:
        """Calls found so far."""
        return self._calls.num_calls

    def feed(self, delta: str) -> list[Piece]:
        """Return the pieces that are certain now that the text has grown by `delta`."""
        return self._divided(self._thoughts.feed(delta))

    def finish(self) -> list[Piece]:
        """Return what was held back, at the end of the text."""
        return [*self._divided(self._thoughts.finish()), *self._calls.finish()]

    def _divided(self, pieces: list[Piece]) -> list[Piece]:
        divided: list[Piece] = []
        for piece in pieces:
            divided += self._calls.feed(piece) if isinstance(piece, str) else [piece]
        return divided
