"""`Limits`: how much a step may hold. Plain data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds the steps of one scheduler.

    Attributes:
        max_num_seqs: slots. No more than `max_num_batched_tokens` are used, so that every decode gets its token.
        max_num_batched_tokens: the token budget of a step.
        max_prefill_tokens_per_step: how many of them may go to sequences that owe more than one token while others
            decode, or in the background; None: all that the decodes leave.
        background_tokens_per_step: how many tokens sequences in the background may have beside others.
        max_scored_tokens: the most prompt tokens that a step scores: each needs a row of logits as wide as the
            vocabulary.
        recompute_beyond: a sequence that grows past this length is recomputed from its start, because the model sees
            all of its tokens differently from then on (LongRoPE); None: there is no such length.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens_per_step: int | None = None
    background_tokens_per_step: int = 0
    max_scored_tokens: int = 256
    recompute_beyond: int | None = None
