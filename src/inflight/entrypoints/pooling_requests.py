"""Pooling requests: the texts to run, and how results are computed from their numbers.

`TextReader`: tokenizes texts and pairs, as `sentence-transformers` and a model's card do.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from numbers import Integral
from typing import Generic, TypeAlias, TypeVar

import numpy as np

from inflight.contracts.api.errors import InvalidRequestError
from inflight.contracts.api.model_info import ModelInfo
from inflight.contracts.api.outputs import ClassificationOutput, EmbeddingOutput, ScoreOutput
from inflight.contracts.api.pooling import NORMALIZE, PooledText, PoolingPlan, Values
from inflight.text.tokenizer import Tokenizer

Text: TypeAlias = str | Sequence[int]
"""A text, or its token ids."""

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""Qwen3-Reranker's template around a query and a document."""


class TextReader:
    """Reads the texts of one model's requests.

    Args:
        tokenizer: None: only token ids are taken.
        info: of a model that pools.
        truncate: the most tokens of a text; longer ones are cut. -1: as many as the model allows. None: longer ones are
            refused.

    Raises:
        InvalidRequestError: `truncate` is out of range.
    """

    def __init__(self, tokenizer: Tokenizer | None, info: ModelInfo, truncate: int | None = None) -> None:
        assert info.pooling is not None
        self._given_tokenizer, self._info = tokenizer, info
        self._plan: PoolingPlan = info.pooling
        if truncate is not None and not (truncate == -1 or 1 <= truncate <= info.max_model_len):
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {truncate}; it must be -1, or from 1 to {info.max_model_len}, the most "
                "tokens of a text"
            )
        self._most = info.max_model_len if truncate == -1 else truncate

    def single(self, text: Text, prompt: str = "") -> PooledText:
        """Read a text after a prompt (token ids have none). Raises `InvalidRequestError` if it cannot run."""
        if not isinstance(text, str):
            return self._checked(PooledText(self._token_ids(text)[: self._most]))
        self._check(text)
        prompt_length = self._prompt_length(prompt) if prompt and not self._plan.includes_prompt else 0
        return self._checked(PooledText(self._encoded(prompt + text), None, prompt_length))

    def pair(self, first: Text, second: Text, instruction: str | None = None) -> PooledText:
        """Read a pair of texts that run together. Raises `InvalidRequestError` if they cannot run.

        Args:
            instruction: of a reranker; None: its usual one.
        """
        if not (isinstance(first, str) and isinstance(second, str)):
            raise InvalidRequestError("a pair for this model must be two texts, not token ids")
        self._check(first)
        self._check(second)
        if self._plan.task == "rerank":
            return self._checked(self._question(first, second, instruction))
        if instruction is not None:
            raise InvalidRequestError("an instruction was given; this model takes none")
        return self._checked(
            PooledText(*self._tokenizer.encode_pair(self._written(first), self._written(second), self._most))
        )

    def _question(self, query: str, document: str, instruction: str | None) -> PooledText:
        before, after = (self._tokenizer.encode(each, add_special_tokens=False) for each in (BEFORE, AFTER))
        asked = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        middle = self._tokenizer.encode(asked)
        if self._most is not None:
            middle = middle[: max(0, self._most - len(before) - len(after))]
        return PooledText([*before, *middle, *after])

    def _encoded(self, text: str) -> list[int]:
        if self._most is None:
            most = self._tokenizer.most_characters(self._info.max_model_len)
            if len(text) > most:
                raise self._too_long(f"{len(text)} characters")
            return self._tokenizer.encode(self._written(text))
        return self._tokenizer.encode_pair(self._written(text), None, self._most)[0]

    def _prompt_length(self, prompt: str) -> int:
        """The number of tokens of a prompt, without the special token that may end a text."""
        token_ids = self._tokenizer.encode(self._written(prompt))
        ends = bool(token_ids) and token_ids[-1] in self._tokenizer.inner.all_special_ids
        return len(token_ids) - ends

    def _written(self, text: str) -> str:
        return text.lower() if self._plan.lowers else text

    def _check(self, text: str) -> None:
        if not text:
            raise InvalidRequestError("the text is empty; it must have at least one character")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text has {text[error.start]!r} at place {error.start}; it must be text that UTF-8 can encode"
            ) from None

    def _token_ids(self, given: Sequence[int]) -> list[int]:
        if not isinstance(given, Sequence) or isinstance(given, bytes):
            raise InvalidRequestError(f"the text is a {type(given).__name__}; it must be text or token ids")
        for token_id in given:
            if not isinstance(token_id, Integral) or isinstance(token_id, bool):
                raise InvalidRequestError(f"token id {token_id!r} is a {type(token_id).__name__}, not an integer")
            if not 0 <= token_id < self._info.vocab_size:
                raise InvalidRequestError(
                    f"token id {token_id} is out of range; this model has {self._info.vocab_size} tokens"
                )
        return [int(token_id) for token_id in given]

    def _checked(self, text: PooledText) -> PooledText:
        if not text.token_ids:
            raise InvalidRequestError("the text has no tokens; it must have at least one")
        if len(text.token_ids) > self._info.max_model_len:
            raise self._too_long(f"{len(text.token_ids)} tokens")
        if (highest := max(text.token_ids)) >= self._info.vocab_size:
            raise InvalidRequestError(
                f"token id {highest} is out of range; this model has {self._info.vocab_size} tokens"
            )
        return text

    def _too_long(self, size: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"the text has {size}; this model's maximum context length is {self._info.max_model_len} tokens (with "
            "truncate_prompt_tokens=-1 longer texts are cut)"
        )

    @property
    def _tokenizer(self) -> Tokenizer:
        if self._given_tokenizer is None:
            raise InvalidRequestError("text was given, but this model has no tokenizer; give token ids")
        return self._given_tokenizer


Output = TypeVar("Output")
Texts: TypeAlias = Text | Sequence[Text]
"""One text or many, each as text or as token ids."""


@dataclass(frozen=True, slots=True)
class PoolingRequest(Generic[Output]):
    """Texts to run, and a function of the numbers that each of them gets."""

    texts: list[PooledText]
    finish: Callable[[Sequence[Values]], list[Output]]


def embed_request(
    texts: Texts,
    tokenizer: Tokenizer | None,
    info: ModelInfo,
    *,
    prompt_name: str | None = None,
    prompt: str | None = None,
    dimensions: int | None = None,
    truncate: int | None = None,
) -> PoolingRequest[EmbeddingOutput]:
    """Embed each text. Raises `InvalidRequestError`.

    Args:
        prompt_name: of the model's own prompts, which the texts begin with.
        prompt: another one.
        dimensions: keep this many first numbers of a vector, renormalised if the model's vectors are. None: all.
        truncate: see `TextReader`.
    """
    plan = plan_for(info, "embeds", "embed")
    if dimensions is not None and not 1 <= dimensions <= plan.num_values:
        raise InvalidRequestError(f"dimensions is {dimensions}; this model's vectors have {plan.num_values}")
    beginning = _prompt(plan, prompt_name, prompt)
    reader = TextReader(tokenizer, info, truncate)
    read = _read(as_list(texts), lambda text: reader.single(text, beginning))

    def finish(values: Sequence[Values]) -> list[EmbeddingOutput]:
        vectors = values if dimensions is None else [_shortened(each, dimensions, plan) for each in values]
        return [EmbeddingOutput(own, len(text.token_ids)) for own, text in zip(vectors, read, strict=True)]

    return PoolingRequest(read, finish)


def classify_request(
    texts: Texts, tokenizer: Tokenizer | None, info: ModelInfo, *, truncate: int | None = None
) -> PoolingRequest[ClassificationOutput]:
    """Classify each text: a number for each label. Raises `InvalidRequestError`."""
    plan = plan_for(info, "classifies", "classify")
    reader = TextReader(tokenizer, info, truncate)
    read = _read(as_list(texts), reader.single)

    def finish(values: Sequence[Values]) -> list[ClassificationOutput]:
        outputs = []
        for own, text in zip(values, read, strict=True):
            probs = _activated(own, plan)
            label = plan.labels[max(range(len(probs)), key=probs.__getitem__)]
            outputs.append(ClassificationOutput(probs, label, len(text.token_ids)))
        return outputs

    return PoolingRequest(read, finish)


def score_request(
    first: Texts,
    second: Texts,
    tokenizer: Tokenizer | None,
    info: ModelInfo,
    *,
    instruction: str | None = None,
    truncate: int | None = None,
) -> PoolingRequest[ScoreOutput]:
    """A score for each pair of texts: each of `first` with its counterpart in `second`, or the only one with all.
    Raises `InvalidRequestError`.

    Args:
        instruction: of a reranker; None: its default.
    """
    plan = plan_for(info, "scores", "embed", "classify", "rerank")
    if plan.task == "classify" and len(plan.labels) != 1:
        raise InvalidRequestError(f"this model has {len(plan.labels)} labels, and so no score; use classify")
    firsts, seconds = as_list(first), as_list(second)
    if len(firsts) not in (1, len(seconds)):
        raise InvalidRequestError(
            f"{len(firsts)} texts came with {len(seconds)} others; there must be one, or as many as there are others"
        )
    if len(seconds) == 0:
        raise InvalidRequestError("there are no texts to score")
    reader = TextReader(tokenizer, info, truncate)
    if plan.task == "embed":
        if instruction is not None:
            raise InvalidRequestError("an instruction was given; this model takes none")
        return _similarity_request(firsts, seconds, reader, plan)
    paired = zip(firsts * len(seconds) if len(firsts) == 1 else firsts, seconds, strict=True)
    read = _read(list(paired), lambda pair: reader.pair(*pair, instruction))

    def finish(values: Sequence[Values]) -> list[ScoreOutput]:
        return [
            ScoreOutput(_activated(own, plan)[0], len(text.token_ids)) for own, text in zip(values, read, strict=True)
        ]

    return PoolingRequest(read, finish)


def _similarity_request(
    firsts: Sequence[Text], seconds: Sequence[Text], reader: TextReader, plan: PoolingPlan
) -> PoolingRequest[ScoreOutput]:
    if plan.similarity not in ("cosine", "dot"):
        raise InvalidRequestError(
            f"this model compares embeddings by {plan.similarity!r}; inflight compares by 'cosine' and 'dot'"
        )
    read = _read([*firsts, *seconds], reader.single)

    def finish(values: Sequence[Values]) -> list[ScoreOutput]:
        vectors = [np.asarray(each, dtype=np.float32) for each in values]
        if plan.similarity == "cosine":
            vectors = [each / max(float(np.linalg.norm(each)), 1e-12) for each in vectors]
        number = len(firsts)
        outputs = []
        for index, vector in enumerate(vectors[number:]):
            other = 0 if number == 1 else index
            num_tokens = len(read[number + index].token_ids) + (len(read[other].token_ids) if index == other else 0)
            outputs.append(ScoreOutput(float(vectors[other] @ vector), num_tokens))
        return outputs

    return PoolingRequest(read, finish)


def plan_for(info: ModelInfo, does: str, *tasks: str) -> PoolingPlan:
    """Return the model's pooling plan. Raises `InvalidRequestError` unless it is for one of `tasks`."""
    if info.pooling is None:
        raise InvalidRequestError(f"{info.model_class} generates text; it {does} nothing (see the option task)")
    if info.pooling.task not in tasks:
        raise InvalidRequestError(
            f"{info.model_class} was loaded to {info.pooling.task}; it {does} nothing (see the option task)"
        )
    return info.pooling


def as_list(texts: Texts) -> list[Text]:
    """One text, or token ids, or many of them, as a list. Raises `InvalidRequestError`."""
    if isinstance(texts, str) or (isinstance(texts, Sequence) and texts and isinstance(texts[0], Integral)):
        return [texts]  # type: ignore[list-item]
    if not isinstance(texts, Sequence) or isinstance(texts, bytes):
        raise InvalidRequestError(f"the texts are a {type(texts).__name__}; they must be a text, token ids, or a list")
    return list(texts)  # type: ignore[arg-type]


Given = TypeVar("Given")


def _read(given: Sequence[Given], read: Callable[[Given], PooledText]) -> list[PooledText]:
    """All texts, or the first that is wrong, by its place."""
    texts = []
    for index, each in enumerate(given):
        try:
            texts.append(read(each))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"text {index}: {error}" if len(given) > 1 else str(error)) from None
    return texts


def _prompt(plan: PoolingPlan, name: str | None, prompt: str | None) -> str:
    if prompt is not None:
        return prompt
    if name is None:
        return plan.prompts.get(plan.default_prompt or "", "")
    if name not in plan.prompts:
        known = ", ".join(map(repr, plan.prompts)) or "none"
        raise InvalidRequestError(f"prompt_name is {name!r}; this model's prompts are: {known}")
    return plan.prompts[name]


def _shortened(values: Values, dimensions: int, plan: PoolingPlan) -> Values:
    short = np.asarray(values, dtype=np.float32)[:dimensions]
    if NORMALIZE in plan.layers:
        short = short / np.float32(max(float(np.linalg.norm(short)), 1e-12))
    return array("f", short.tobytes())


def _activated(values: Values, plan: PoolingPlan) -> Values:
    if plan.activation == "none":
        return values
    if plan.activation == "sigmoid":
        return array("f", [1 / (1 + exp(-each)) if each > -700 else 0.0 for each in values])
    greatest = max(values)
    weights = [exp(each - greatest) for each in values]
    return array("f", [each / sum(weights) for each in weights])
