"""`SamplingParams`: how one request wants its tokens chosen and when it ends. Plain data, checked when made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from msgspec import Meta

from inflight.contracts.api.options import MAX_FLOAT, NotNegative, check, check_members, is_text, strict_options
from inflight.contracts.api.structured_output import Reasoning, StructuredOutput

MAX_SEED = 2**63 - 1
MAX_SEQUENCES = 16384
"""The most sequences of one request (vLLM's limit)."""
MAX_COUNT = 2**31 - 1
MAX_LOGPROBS = 1000
MAX_BAD_WORDS, MAX_BAD_WORD = 1024, 256
MAX_STOP_CHARACTERS = 2**14
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
NumLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Count: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Bias: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]


@strict_options
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends. Names and meanings are vLLM's.

    Logits are changed in this order: bad words, `min_tokens`, `logit_bias`, repetition, frequency and presence penalty,
    temperature, top-k, top-p, min-p; each sees what the one before has left. Log-probabilities are the model's own,
    before all of these.

    Attributes:
        n: how many sequences to generate for the prompt; each has its own random stream.
        temperature: divides the logits; 0 means greedy (the most likely token, no randomness).
        top_p: keep the smallest set of most likely tokens whose probability reaches this, in (0, 1].
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than this share of the most likely one's probability, in [0, 1].
        presence_penalty: subtracted from the logits of tokens that the output already has, in [-2, 2].
        frequency_penalty: the same, once for each time that the output has them, in [-2, 2].
        repetition_penalty: divides the positive logits, and multiplies the negative ones, of tokens that the prompt or
            the output has; in [0.01, 100]; 1 changes nothing (Keskar et al., 2019).
        logit_bias: what to add to the logits of token ids.
        bad_words: texts that are never generated: their last token is never chosen after the others.
        logprobs: how many of the likeliest tokens to report with each output token, besides its own log-probability;
            0: only its own; None: none.
        prompt_logprobs: the same for each prompt token but the first. The whole prompt is computed then, without the
            prefix cache.
        structured_output: what the whole output must look like: JSON of a schema, a regular expression, … Only tokens
            that can lead there are chosen.
        seed: of the request's random numbers: the same seed gives the same tokens, whatever else runs. None: it depends
            on the engine's seed and the order of arrival.
        max_tokens: the most tokens to generate; None: until a stop or the context is full.
        min_tokens: before this many tokens, neither EOS nor a stop token is chosen, and stop strings do not count.
        stop: strings that end the text, of at most 16,384 characters in all. The text is cut just before the first that
            appears.
        reasoning: what the output may begin with, and where stop strings do not count; None: nothing.
        stop_token_ids: token ids that end the sequence, besides the model's EOS ids.
        ignore_eos: EOS does not end the sequence.
        include_stop_str_in_output: keep the stop string at the end of the text.
        skip_special_tokens: leave special tokens out of the text.
        truncate_prompt_tokens: how many of the prompt's last tokens to keep.
        prediction: what the output may be like in parts: text or token ids (OpenAI's predicted outputs). Where the
            engine speculates, its tokens are drafted; the output stays the same.
        speculation: whether tokens may be drafted where the engine speculates; the output is the same either way.

    Raises:
        ValueError: an option is unknown, out of range, or does not go with another.
    """

    n: Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)] = 1
    temperature: Annotated[float, Meta(ge=0, le=MAX_FLOAT, description="a finite number of at least 0")] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    structured_output: StructuredOutput | None = None
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    max_tokens: Count | None = 16
    min_tokens: NotNegative = 0
    stop: str | Sequence[str] | None = None
    reasoning: Reasoning | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: Count | None = None
    prediction: str | Sequence[int] | None = None
    speculation: bool = True

    def __post_init__(self) -> None:
        if self.structured_output is not None and not isinstance(self.structured_output, StructuredOutput):
            raise ValueError(f"structured_output is {self.structured_output!r}; it must be a StructuredOutput")
        if self.reasoning is not None and not isinstance(self.reasoning, Reasoning):
            raise ValueError(f"reasoning is {self.reasoning!r}; it must be Reasoning")
        self._check_logit_bias()
        self._check_bad_words()
        most = MAX_COUNT if self.max_tokens is None else self.max_tokens
        if self.min_tokens > most:
            raise ValueError(f"min_tokens is {self.min_tokens}; it must be an integer from 0 to {most}")
        if self.stop is not None and not isinstance(self.stop, Sequence):
            raise ValueError(f"stop is {self.stop!r}; it must be a non-empty string or a list of such strings")
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop contains {text!r}; it must be a non-empty string or a list of such strings")
        num_characters = sum(map(len, self.stop_strings))
        if num_characters > MAX_STOP_CHARACTERS:
            raise ValueError(f"stop has {num_characters} characters in all; it must be at most {MAX_STOP_CHARACTERS}")
        if self.stop_token_ids is not None and not isinstance(self.stop_token_ids, Sequence):
            raise ValueError(f"stop_token_ids is {self.stop_token_ids!r}; it must be a list of token ids")
        check_members("a member of stop_token_ids", self.stop_token_ids or (), NotNegative)
        self._check_prediction()

    def _check_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias is {self.logit_bias!r}; it must be a dict of token ids and numbers")
        check_members("a token id of logit_bias", self.logit_bias, NotNegative)
        for token_id, bias in self.logit_bias.items():
            check(f"logit_bias[{token_id}]", bias, Bias)

    def _check_bad_words(self) -> None:
        if self.bad_words is None:
            return
        if isinstance(self.bad_words, str) or not isinstance(self.bad_words, Sequence):
            raise ValueError(f"bad_words is {self.bad_words!r}; it must be a list of non-empty strings")
        for word in self.bad_words:
            if not isinstance(word, str) or not 0 < len(word) <= MAX_BAD_WORD:
                raise ValueError(
                    f"bad_words contains {word!r}; it must be a list of strings of 1 to {MAX_BAD_WORD} characters"
                )
            if not is_text(word):
                raise ValueError(f"bad_words contains {word!r}; it must be text that UTF-8 can encode")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise ValueError(f"bad_words has {len(self.bad_words)} strings; it must be at most {MAX_BAD_WORDS}")

    def _check_prediction(self) -> None:
        if isinstance(self.prediction, str):
            if not is_text(self.prediction):
                raise ValueError(f"prediction is {self.prediction!r}; it must be text that UTF-8 can encode")
        elif self.prediction is not None:
            if not isinstance(self.prediction, Sequence) or isinstance(self.prediction, bytes | bytearray):
                raise ValueError(f"prediction is {self.prediction!r}; it must be text or a list of token ids")
            check_members("a member of prediction", self.prediction, TokenId)

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that the sequence already has are treated differently."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed before temperature and filters."""
        return bool(self.min_tokens or self.logit_bias or self.bad_words or self.has_penalties)

    @property
    def asks_for_scores(self) -> bool:
        """Whether log-probabilities are reported."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, empty if there is none."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


DEFAULT_PARAMS = SamplingParams()
