"""What an engine learns and counts from its steps: how much prefill a step may have, the cost of draft tokens, whether
loading a prefix beats computing it, what keeping blocks for a session saves, and the totals of `EngineStats`.

`PrefillLimit`: bounds the prefill tokens of a step beside decodes, from measured step times.

The model: a step lasts `time of its decodes alone + prefill tokens x time per prefill token` (Sarathi-Serve, Agrawal et
al., OSDI 2024, sets its chunks by such a time budget). The limit keeps a step at most `1 + stretch` times as long as a
step of decodes alone. Under load hardly any step has decodes alone: but a prefill token takes no longer than the
average token of its step, so `stretch` of them for each decode are always within the limit.

In the background no caller waits for a token, but the next request waits for the end of the step, which a small step
keeps short compared with its own prefill. Between steps, images are encoded for a share of the decodes' time.

Pure: callers pass durations in.
"""

from bisect import bisect_left
from dataclasses import dataclass, field

from inflight.contracts.step.plan import StepPlan
from inflight.contracts.step.record import STEP_SIZES, EngineStats
from inflight.prefix_store import PrefixStore
from inflight.scheduling.scheduler import Scheduler
from inflight.speculation import Speculation
from inflight.speculation.step_times import StepTimes

MIN_TOKENS = 16
"""Fewer do not pay: where decoding is memory-bound, this many rows cost hardly more than one."""

BACKGROUND_TOKENS = 64
"""Prefill tokens that a background step may always have: fewer would leave slots empty."""

BACKGROUND_SECONDS = 0.1
"""Seconds within which it may have more."""

SMOOTHING = 0.2
"""Weight of the newest measurement in the running average."""

ENCODING_STRETCH = 0.2
"""The time for encoding images between two steps, as a share of the decodes' own. Text comes first: with slices of two
decodes a prompt with images waited half as long, and a token's p99 beside it was three to six times that of text
alone."""

LEAST_SHARE = 0.1
"""The least share of a step's time that counts as its prefill's."""


class PrefillLimit:
    """Learns from observed steps. Until it has seen steps with and without prefill, it limits only background work."""

    def __init__(self, stretch: float = 2.0) -> None:
        self.stretch = stretch
        self._decode_times = StepTimes()  # of steps without prefill
        self._seconds_per_token: float | None = None

    def encoding_seconds(self, num_decodes: int) -> float:
        """For how long images may be encoded between steps of `num_decodes`."""
        alone = self._decode_times.seconds(num_decodes) if num_decodes else None
        return BACKGROUND_SECONDS if alone is None else ENCODING_STRETCH * alone

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


@dataclass(slots=True)
class Totals:
    """What has been done since the engine was made; see `EngineStats`."""

    requests: int = 0
    generated_tokens: int = 0
    steps: int = 0
    step_tokens: int = 0
    steps_by_size: list[int] = field(default_factory=lambda: [0] * (len(STEP_SIZES) + 1))

    def observe(self, plan: StepPlan) -> None:
        """Count a step."""
        self.steps += 1
        self.step_tokens += plan.num_tokens
        self.steps_by_size[bisect_left(STEP_SIZES, plan.num_tokens)] += 1

    def stats(self, scheduler: Scheduler) -> EngineStats:
        """These totals, the scheduler's, and what it holds now."""
        pool = scheduler.block_pool
        return EngineStats(
            num_requests=self.requests,
            num_prompt_tokens=scheduler.count.prompt_tokens,
            num_cached_tokens=scheduler.reuse.num_cached_tokens,
            num_generated_tokens=self.generated_tokens,
            num_steps=self.steps,
            num_preemptions=scheduler.count.preemptions,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks_used=pool.num_used,
            num_blocks_cached=pool.num_cached,
            num_blocks_kept=pool.num_kept,
            num_blocks_free=pool.num_free,
            num_drafts=scheduler.count.drafts,
            num_restored_tokens=scheduler.persistence.num_restored_tokens,
            num_draft_tokens=scheduler.count.draft_tokens,
            num_accepted_tokens=scheduler.count.accepted_tokens,
            num_step_tokens=self.step_tokens,
            num_steps_by_size=tuple(self.steps_by_size),
        )


class StepFeedback:
    """Learns from the time of each step.

    Attributes:
        prefill_limit: if set, bounds the prefill of coming steps, unless the scheduler was given a bound.
    """

    def __init__(self, scheduler: Scheduler, speculation: Speculation | None, store: PrefixStore | None) -> None:
        self._scheduler, self._speculation, self._store = scheduler, speculation, store
        self._num_accepted_tokens = 0
        self.prefill_limit: PrefillLimit | None = None

    @property
    def encoding_seconds(self) -> float | None:
        """For how long images may be encoded before the next step; None: no limit."""
        return None if self.prefill_limit is None else self.prefill_limit.encoding_seconds(self._scheduler.num_decodes)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learn from a step."""
        scheduler = self._scheduler
        if self._speculation is not None:
            num_draft_tokens = sum(span.num_draft_tokens for span in plan.spans)
            num_accepted = scheduler.count.accepted_tokens - self._num_accepted_tokens
            num_sequences = sum(span.num_logit_rows > len(span.scored_ids) for span in plan.spans)
            self._speculation.observe(plan.num_tokens, seconds, num_draft_tokens, num_accepted, num_sequences)
            self._num_accepted_tokens += num_accepted
        retention = scheduler.retention
        if self.prefill_limit is None and self._store is None and retention is None:
            return
        prefills = [length for span in plan.spans if (length := span.length - span.num_draft_tokens) > 1]
        for each in (self._store, retention):
            if each is not None and 2 * sum(prefills) > plan.num_tokens:
                each.observe_prefill(sum(prefills), seconds)
        if self.prefill_limit is None:
            return
        self.prefill_limit.observe(plan.num_tokens - sum(prefills), sum(prefills), seconds)
        if scheduler.limits.max_prefill_tokens_per_step is None:
            scheduler.limit_prefill = self.prefill_limit.num_tokens
