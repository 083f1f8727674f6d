"""`PrefillLimit`: how many prefill tokens a step may have beside decodes, from how long steps were seen to take.

The model: a step lasts `decode time + tokens x time per prefill token` (Sarathi-Serve, Agrawal et al., OSDI 2024, sets
its chunks by such a time budget). The limit keeps a step at most `1 + stretch` times as long as a step of decodes
alone. Pure: callers pass durations in.
"""

MIN_TOKENS = 16
"""Fewer would not pay: where decoding is bound by memory, this many rows cost hardly more than one."""

SMOOTHING = 0.2
"""Weight of the newest measurement in the running averages."""


class PrefillLimit:
    """Learns from the steps that it sees. Until it has seen steps with and without prefill it sets no limit."""

    def __init__(self, stretch: float = 2.0) -> None:
        self.stretch = stretch
        self._decode_seconds: float | None = None
        self._seconds_per_token: float | None = None

    @property
    def num_tokens(self) -> int | None:
        """The limit; None: not known yet."""
        if self._decode_seconds is None or self._seconds_per_token is None:
            return None
        return max(MIN_TOKENS, int(self.stretch * self._decode_seconds / self._seconds_per_token))

    def see(self, num_decodes: int, num_prefill_tokens: int, seconds: float) -> None:
        """Learn from one step, which took `seconds`."""
        if num_prefill_tokens == 0:
            self._decode_seconds = _smooth(self._decode_seconds, seconds)
        elif num_prefill_tokens >= MIN_TOKENS:
            fixed = self._decode_seconds if num_decodes and self._decode_seconds is not None else 0.0
            per_token = max(seconds - fixed, seconds * 0.1) / num_prefill_tokens
            self._seconds_per_token = _smooth(self._seconds_per_token, per_token)


def _smooth(average: float | None, newest: float) -> float:
    return newest if average is None else average + SMOOTHING * (newest - average)
