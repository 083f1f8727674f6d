"""`Outcomes`: how often draft tokens of one kind were right."""


class Outcomes:
    """A running share of accepted draft tokens.

    Args:
        memory: how much of what was seen counts after each new outcome.
    """

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._num_right = self._num_tried = 0.0

    def observe(self, is_right: bool) -> None:
        """A draft token was right, or not."""
        self._num_right = self._num_right * self._memory + is_right
        self._num_tried = self._num_tried * self._memory + 1.0

    def chance(self, prior: float, weight: float) -> float:
        """The chance that the next draft token is right; `prior`, known otherwise, counts as `weight` outcomes."""
        return (self._num_right + prior * weight) / (self._num_tried + weight)

    def fade(self, share: float) -> None:
        """From now on what was seen counts only so much."""
        self._num_right *= share
        self._num_tried *= share
