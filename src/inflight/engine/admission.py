"""Admission: validates requests and resolves them against the model. Every caller's mistake is refused here, in one
sentence with the value and what would be accepted. Nothing is checked again later.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, count
from typing import TYPE_CHECKING

from inflight.contracts.api.config import BACKGROUND, NO_ADAPTERS, EngineConfig
from inflight.contracts.api.errors import AdapterError, InvalidRequestError
from inflight.contracts.api.features import MULTIMODAL, Features
from inflight.contracts.api.model_info import ModelInfo, refusal_to_generate
from inflight.contracts.api.options import is_text
from inflight.contracts.api.params import SamplingParams
from inflight.contracts.api.pooling import PooledText
from inflight.contracts.step.multimodal import KINDS, MultimodalInputs
from inflight.contracts.step.plan import BadWords
from inflight.scheduling.sequence import Request
from inflight.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from inflight.execution.adapters import AdapterCheckpoint
    from inflight.grammar.matcher import GrammarMatcher

MAX_PRIORITY = BACKGROUND
POOLS = SamplingParams(temperature=0, max_tokens=1)
"""For pooled texts, for which no token is sampled."""


@dataclass(frozen=True, slots=True)
class AcceptedRequest:
    """A request that may be queued.

    Attributes:
        deadline: a time of `time.monotonic()` at which it is aborted if unfinished.
        is_compiled: whether its grammar, bad words, prediction and adapter are ready, if it has any.
        grammar: constrains its output; None: free text.
        adapter_source: the folder or hub repository of its adapter; None: none.
        adapter: that adapter, once open and while in use.
    """

    request: Request
    deadline: float | None = None
    is_compiled: bool = True
    grammar: GrammarMatcher | None = None
    adapter_source: str | None = None
    adapter: AdapterCheckpoint | None = None

    @property
    def params(self) -> SamplingParams:
        """Its sampling parameters, resolved."""
        return self.request.params


class Seeds:
    """Seeds for requests that have none: the same ones for the same requests in the same order."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._numbers = count(1)

    def next(self) -> int:
        """Return the next request's seed. Thread-safe."""
        return random.Random(f"{self._seed} {next(self._numbers)}").getrandbits(63)


class Admission:
    """Accepts requests for one engine.

    Args:
        tokenizer: finds stop strings and spells bad words; without one, requests that have some are refused.

    Attributes:
        spelled: cached tokens of bad words; thread-safe. The prompts of one call mostly share them.
    """

    def __init__(self, config: EngineConfig, model_info: ModelInfo, tokenizer: Tokenizer | None) -> None:
        self._seeds = Seeds(config.seed)
        self._takes_adapters = config.adapters is not None
        self._model_info = model_info
        self._tokenizer = tokenizer
        self.spelled = lru_cache(maxsize=2)(self._spelled)

    def accept(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter_source: str | None = None,
        deadline: float | None = None,
        text: PooledText | None = None,
        multimodal: MultimodalInputs | None = None,
    ) -> AcceptedRequest:
        """Check a request and resolve it against the model, except for what `InputProcessor.compile` does.

        Args:
            priority: lower runs first, where the engine's policy is "priority".
            cache_salt: only requests with the same salt share cached prefixes.
            adapter_source: the folder or hub repository of its adapter; None: it has none.
            deadline: a time of `time.monotonic()` at which it is aborted unless it has finished.
            text: what to pool, with the prompt's tokens; None: it generates.
            multimodal: the images and sounds of the prompt.

        Raises:
            InvalidRequestError: the model cannot answer it as asked.
            AdapterError: it names an adapter, but the engine has none.
        """
        info = self._model_info
        if text is not None:
            return self.accept_text(request_id, text, deadline)
        if info.pooling is not None:
            raise refusal_to_generate(info)
        if adapter_source is not None and not self._takes_adapters:
            raise AdapterError(NO_ADAPTERS)
        if params.stop_strings and self._tokenizer is None:
            raise InvalidRequestError(f"stop is {params.stop!r}, but this model has no tokenizer to find text with")
        if params.bad_words and self._tokenizer is None:
            raise InvalidRequestError(f"bad_words is {params.bad_words!r}, but this model has no tokenizer")
        if isinstance(params.prediction, str) and self._tokenizer is None:
            raise InvalidRequestError("prediction is text, but this model has no tokenizer")
        request = make_request(
            request_id,
            prompt_token_ids,
            params,
            info,
            priority=priority,
            cache_salt=cache_salt,
            multimodal=multimodal,
        )
        drawn = self._seeds.next()
        seed = drawn if params.seed is None else params.seed
        is_compiled = params.structured_output is None and not params.bad_words and not params.prediction
        return AcceptedRequest(replace(request, seed=seed), deadline, is_compiled, adapter_source=adapter_source)

    def accept_text(self, request_id: str, text: PooledText, deadline: float | None = None) -> AcceptedRequest:
        """Check a pooling request, with a deadline as in `AcceptedRequest`. Raises `InvalidRequestError`."""
        return AcceptedRequest(pooling_request(request_id, text, self._model_info), deadline)

    def predicted_ids(self, params: SamplingParams) -> list[int]:
        """The tokens of a prediction, cut to the model's length; empty without one. Thread-safe."""
        most, token_ids = self._model_info.max_model_len, params.prediction or ()
        if isinstance(token_ids, str):
            assert self._tokenizer is not None
            text = token_ids[: self._tokenizer.most_characters(most)]
            token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        return list(token_ids[:most])

    def _spelled(self, words: tuple[str, ...]) -> BadWords:
        assert self._tokenizer is not None
        spelled = chain.from_iterable(map(self._tokenizer.spellings, words))
        return by_beginning(word for word in spelled if max(word) < self._model_info.vocab_size)


def by_beginning(words: Iterable[tuple[int, ...]]) -> BadWords:
    """Tokenized words, keyed by all but their last token, so that one lookup finds those that a sequence has begun."""
    ends: dict[tuple[int, ...], list[int]] = {}
    for *beginning, end in words:
        ends.setdefault(tuple(beginning), []).append(end)
    return ends


def make_request(
    request_id: str,
    prompt_token_ids: SequenceOf[int],
    params: SamplingParams,
    info: ModelInfo,
    *,
    priority: int = 0,
    cache_salt: str | None = None,
    multimodal: MultimodalInputs | None = None,
) -> Request:
    """Return a request that the scheduler can run to its end. Raises `InvalidRequestError`."""
    if multimodal is not None:
        _check_multimodal(multimodal, params, info)
    elif info.needs_item:
        raise InvalidRequestError("the model reads one image or one sound with each prompt; this one has none")
    prompt = _token_ids("the prompt", prompt_token_ids, info.vocab_size)
    if params.truncate_prompt_tokens is not None:
        prompt = prompt[-params.truncate_prompt_tokens :]
    if not prompt:
        raise InvalidRequestError("the prompt is empty; it must have at least one token")
    if len(prompt) >= info.max_model_len:
        raise InvalidRequestError(
            f"the prompt has {len(prompt)} tokens; with at least one to be generated, at most "
            f"{info.max_model_len - 1} are accepted (max_model_len is {info.max_model_len})"
        )
    if not _is_integer(priority) or abs(operator.index(priority)) > MAX_PRIORITY:
        raise InvalidRequestError(
            f"priority is {priority!r}; it must be an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}, lower runs first"
        )
    if cache_salt is not None and not is_text(cache_salt):
        raise InvalidRequestError(f"cache_salt is {cache_salt!r}; it must be text that UTF-8 can encode")
    _token_ids("logit_bias", list(params.logit_bias or ()), info.vocab_size)
    if params.prediction is not None and not isinstance(params.prediction, str):
        _token_ids("prediction", params.prediction, info.vocab_size)
    stop_token_ids = set(_token_ids("stop_token_ids", params.stop_token_ids or (), info.vocab_size))
    if not params.ignore_eos:
        stop_token_ids.update(info.eos_token_ids)
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        max_num_tokens=_max_num_tokens(len(prompt), params.max_tokens, info),
        min_output_tokens=params.min_tokens,
        stop_token_ids=frozenset(stop_token_ids),
        num_sequences=params.n,
        priority=operator.index(priority),
        cache_salt=cache_salt,
        scores_prompt=params.prompt_logprobs is not None,
        params=params,
        multimodal=multimodal,
    )


def _check_multimodal(inputs: MultimodalInputs, params: SamplingParams, info: ModelInfo) -> None:
    for kind in {item.kind for item in inputs.items}:
        if (why_not := why_none_of(kind, info)) is not None:
            raise InvalidRequestError(f"the prompt has {KINDS[kind]}: {why_not}")
    if params.truncate_prompt_tokens is not None:
        raise InvalidRequestError("truncate_prompt_tokens would cut images or sounds; give a shorter prompt")


def leave_to_generate(request: Request) -> Request:
    """A request that the model's own `generate` runs: no draft token can be taken back there. Raises
    `InvalidRequestError`."""
    for name, value in (("prompt_logprobs", request.params.prompt_logprobs), ("an adapter", request.adapter)):
        if value is not None:
            raise InvalidRequestError(f"the model's own generate runs this prompt, without {name}; leave it out")
    params = replace(request.params, speculation=False)
    return replace(request, params=params, left_to_generate=True)


def check_whole(inputs: MultimodalInputs, limit: int) -> None:
    """Raise `InvalidRequestError` unless a step has room for every image whose tokens see each other.

    Args:
        limit: the tokens of a step that one sequence can have beside all others.
    """
    longest = max((end - start for start, end in inputs.whole), default=0)
    if longest > limit:
        raise InvalidRequestError(
            f"an image has {longest} tokens that see each other; a step has room for {limit} (raise "
            "max_num_batched_tokens)"
        )


def why_none_of(kind: str, info: ModelInfo) -> str | None:
    """Why a prompt can have no items of this kind; None: it can."""
    if kind in info.input_modalities:
        return None
    return Features.from_info(info).why_not(MULTIMODAL) or f"{info.model_class} has no encoder for them"


def pooling_request(request_id: str, text: PooledText, info: ModelInfo) -> Request:
    """Return a pooling request that the scheduler can run to its end. Raises `InvalidRequestError`."""
    if info.pooling is None:
        raise InvalidRequestError(f"{info.model_class} generates text; it pools nothing")
    token_ids = _token_ids("the text", text.token_ids, info.vocab_size)
    longest = min(info.max_model_len, info.max_cached_len)
    if not 0 < len(token_ids) <= longest:
        raise InvalidRequestError(f"a text has {len(token_ids)} tokens, not 1 to {longest}")
    return Request(
        request_id, token_ids, len(token_ids) + 1, text=text, runs_whole=info.pooling.runs_whole(text), params=POOLS
    )


def _max_num_tokens(prompt_len: int, max_tokens: int | None, info: ModelInfo) -> int:
    """The number of tokens at which a sequence ends: as requested, limited by the model's length."""
    capacity = info.max_cached_len + 1  # the last generated token is never computed
    if max_tokens is None and prompt_len < capacity:
        return min(info.max_model_len, capacity)
    wanted = min(info.max_model_len, prompt_len + (max_tokens or 1))
    if wanted > capacity:
        raise InvalidRequestError(
            f"the prompt has {prompt_len} tokens and would grow to {wanted}; the whole cache can only serve a sequence "
            f"of {capacity} ({info.num_blocks} blocks of {info.block_size} tokens); a larger kv_cache_memory, or a "
            "kv_cache_dtype of fewer bits, makes room for more"
        )
    return wanted


def _token_ids(name: str, token_ids: SequenceOf[int], vocab_size: int) -> list[int]:
    try:
        given = list(token_ids)
    except TypeError:
        raise InvalidRequestError(f"{name} is {token_ids!r}; it must be a list of token ids") from None
    try:
        ids = list(map(operator.index, given))
    except TypeError:
        wrong = next(token_id for token_id in given if not _is_integer(token_id))
        raise InvalidRequestError(f"{name} contains {wrong!r}, which is not a token id (an integer)") from None
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong_id = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise InvalidRequestError(
            f"{name} contains token id {wrong_id}; the model's vocabulary has the ids from 0 to {vocab_size - 1}"
        )
    return ids


def _is_integer(value: object) -> bool:
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True
