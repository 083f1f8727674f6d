"""`Outcomes`: a running acceptance rate."""


class Outcomes:
    """A running share of correct draft tokens.

    Args:
        memory: the decay of earlier outcomes at each new one.
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
        """Multiply the weight of earlier outcomes by `share`."""
        self._num_right *= share
        self._num_tried *= share
