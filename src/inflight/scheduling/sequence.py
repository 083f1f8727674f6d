"""`Request`, and `Sequence`: one stream of tokens that answers it. State, no decisions."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from inflight.contracts.api.config import BACKGROUND
from inflight.contracts.api.outputs import FinishReason
from inflight.contracts.api.params import DEFAULT_PARAMS, SamplingParams
from inflight.contracts.api.pooling import PooledText
from inflight.contracts.step.block_hash import Root
from inflight.contracts.step.multimodal import MultimodalInputs
from inflight.contracts.step.plan import NO_STATE, BadWords
from inflight.scheduling.block_pool import BlockTables
from inflight.scheduling.prefix_cache import Key, Parent, make_key


@dataclass(frozen=True, slots=True)
class Request:
    """A resolved request; its sampling parameters are passed on to the runner.

    Attributes:
        prompt_token_ids: at least one.
        max_num_tokens: the number of prompt and output tokens at which a sequence ends with "length".
        min_output_tokens: a stop token ends a sequence only from this many output tokens on.
        stop_token_ids: any of them, EOS ids included, ends a sequence with "stop".
        num_sequences: the number of sequences (`n`).
        priority: lower runs first, where the policy looks at it; `BACKGROUND` counts under every policy.
        cache_salt: only requests of the same salt share cached prefixes.
        adapter: the digest of its adapter; None: none. Only requests with the same adapter share prefixes.
        scores_prompt: whether the first of its sequences needs the log-probability of each prompt token.
        params, seed, bad_words: how its tokens are sampled (see `SlotAssignment`).
        predicted_ids: the caller's prediction of parts of its output.
        text: the text to pool; None: it generates.
        multimodal: the images and sounds of its prompt; None: it has none.
        runs_whole: whether all of its tokens must run in one step, because all their states are pooled.
        left_to_generate: whether the model's own `generate` runs it, so that its blocks stay empty and nothing of it is
            kept.
    """

    request_id: str
    prompt_token_ids: SequenceOf[int]
    max_num_tokens: int
    min_output_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    num_sequences: int = 1
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None
    scores_prompt: bool = False
    params: SamplingParams = DEFAULT_PARAMS
    seed: int = 0
    bad_words: BadWords = field(default_factory=dict)
    predicted_ids: SequenceOf[int] = ()
    text: PooledText | None = None
    multimodal: MultimodalInputs | None = None
    runs_whole: bool = False
    left_to_generate: bool = False


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens: `token_ids` (prompt, then output), of which `num_computed_tokens` are in the cache.

    It waits (no slot), runs (a slot), or is finished (`finish_reason` set). A preempted sequence waits again: it has no
    computed tokens, and keeps its output in `token_ids`.

    Attributes:
        arrival: the first step that could have included it.
        block_tables: its blocks in each cache group.
        root: the root of the prefix cache for its keys and values.
        parent: the prefix cache's node of the last of its `num_known_blocks`.
        num_known_blocks: how many of its first blocks can be found in the prefix cache.
        num_cached_tokens: prompt tokens taken from the cache when it first ran.
        num_draft_tokens, num_accepted_tokens: draft tokens that were verified, and those that were accepted.
        num_scored_tokens: prompt tokens that need no further log-probability. The first never needs one.
        state: the recurrent state of its computed tokens.
        checkpoints: positions at which states of it are to be kept.
        newest_checkpoint: the state at the last of its block ends.
    """

    sequence_id: int
    request: Request
    index: int
    token_ids: list[int]
    arrival: int
    block_tables: BlockTables
    num_computed_tokens: int = 0
    slot: int | None = None
    finish_reason: FinishReason | None = None
    num_preemptions: int = 0
    root: Root = field(default_factory=Root)
    parent: Parent = field(default_factory=Root)
    num_known_blocks: int = 0
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_scored_tokens: int = 1
    state: int = NO_STATE
    checkpoints: frozenset[int] = frozenset()
    newest_checkpoint: int = NO_STATE

    @property
    def is_background(self) -> bool:
        """Whether it runs only in budget that other sequences leave."""
        return self.request.priority == BACKGROUND

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens in its request's prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_blocks(self) -> int:
        """Blocks in each of its tables, including freed ones."""
        return len(self.block_tables[0])

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens still to compute."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def wants_scores(self) -> bool:
        """Whether prompt tokens still need log-probabilities: then the whole prompt must be computed."""
        return self.request.scores_prompt and self.index == 0 and self.num_scored_tokens < self.num_prompt_tokens

    @property
    def computes_prompt(self) -> bool:
        """Whether the whole prompt must be computed, even if some of it is cached."""
        return self.wants_scores or self.request.runs_whole or self.request.left_to_generate

    def key_of(self, parent: Parent, start: int, end: int) -> Key:
        """The prefix cache's key of its block of the tokens `[start, end)` after `parent`."""
        inputs = self.request.multimodal
        parent, token_ids = make_key(parent, self.token_ids[start:end])
        return parent, token_ids if inputs is None else token_ids + inputs.digest_between(start, end)

    def ids_to_score(self, end: int) -> SequenceOf[int]:
        """The prompt tokens that get log-probabilities when the first `end` tokens are computed."""
        if not self.wants_scores:
            return ()
        return self.token_ids[self.num_scored_tokens : min(end + 1, self.num_prompt_tokens)]

    def has_grown_past(self, length: int, new_token_ids: SequenceOf[int]) -> bool:
        """Whether `new_token_ids`, its last tokens, took the sequence past `length` tokens."""
        return len(self.token_ids) - len(new_token_ids) <= length < len(self.token_ids)

    def append(self, sampled: SequenceOf[int]) -> list[int]:
        """Append tokens up to the one that finishes the sequence, set `finish_reason`, and return the appended
        tokens."""
        request = self.request
        taken: list[int] = []
        for token in sampled:
            self.token_ids.append(token)
            taken.append(token)
            if token in request.stop_token_ids and self.num_output_tokens >= request.min_output_tokens:
                self.finish_reason = "stop"
            elif len(self.token_ids) >= request.max_num_tokens:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        return taken
