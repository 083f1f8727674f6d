"""`PrefillLimit`: bounds the prefill tokens of a step beside decodes, from measured step times.

The model: a step lasts `time of its decodes alone + prefill tokens x time per prefill token` (Sarathi-Serve, Agrawal et
al., OSDI 2024, sets its chunks by such a time budget). The limit keeps a step at most `1 + stretch` times as long as a
step of decodes alone. Under load hardly any step has decodes alone: but a prefill token takes no longer than the
average token of its step, so `stretch` of them for each decode are always within the limit.

In the background no caller waits for a token, but the next request waits for the end of the step, which a small step
keeps short compared with its own prefill.

Pure: callers pass durations in.
"""

from inflight.speculation.step_times import StepTimes

MIN_TOKENS = 16
"""Fewer do not pay: where decoding is memory-bound, this many rows cost hardly more than one."""

BACKGROUND_TOKENS = 64
"""Prefill tokens that a background step may always have: fewer would leave slots empty."""

BACKGROUND_SECONDS = 0.1
"""Seconds within which it may have more."""

SMOOTHING = 0.2
"""Weight of the newest measurement in the running average."""

LEAST_SHARE = 0.1
"""The least share of a step's time that counts as its prefill's."""


class PrefillLimit:
    """Learns from observed steps. Until it has seen steps with and without prefill, it limits only background work."""

    def __init__(self, stretch: float = 2.0) -> None:
        self.stretch = stretch
        self._decode_times = StepTimes()  # of steps without prefill
        self._seconds_per_token: float | None = None

    def num_tokens(self, num_decodes: int, in_background: bool = False) -> int | None:
        """The limit beside `num_decodes`; None: unknown yet."""
        alone = self._decode_times.seconds(num_decodes) if num_decodes else 0.0
        if self._seconds_per_token is None:
            return BACKGROUND_TOKENS if in_background else None
        if in_background:
            seconds = BACKGROUND_SECONDS - (alone or 0.0)
            return max(BACKGROUND_TOKENS, int(seconds / self._seconds_per_token))
        if alone is None:
            return None
        return max(MIN_TOKENS, int(self.stretch * max(alone / self._seconds_per_token, num_decodes)))

    def observe(self, num_decodes: int, num_prefill_tokens: int, seconds: float) -> None:
        """Learn from one step, which took `seconds`.

        Args:
            num_decodes: its tokens that are no prefill, draft tokens included.
        """
        if num_prefill_tokens == 0:
            self._decode_times.observe(num_decodes, seconds)
        elif num_prefill_tokens >= MIN_TOKENS:
            alone = (self._decode_times.seconds(num_decodes) or 0.0) if num_decodes else 0.0
            per_token = max(seconds - alone, seconds * LEAST_SHARE) / num_prefill_tokens
            per_token = min(per_token, seconds / (num_decodes + num_prefill_tokens))
            known = per_token if self._seconds_per_token is None else self._seconds_per_token
            self._seconds_per_token = known + SMOOTHING * (per_token - known)
