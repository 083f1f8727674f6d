"""Pooling requests: the texts to run, and how results are computed from their numbers."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from numbers import Integral
from typing import Generic, TypeAlias, TypeVar

import numpy as np

from inflight.contracts.errors import InvalidRequestError
from inflight.contracts.model_info import ModelInfo
from inflight.contracts.outputs import ClassificationOutput, EmbeddingOutput, ScoreOutput
from inflight.contracts.pooling import NORMALIZE, PooledText, PoolingPlan, Values
from inflight.entrypoints.pooling_texts import Text, TextReader
from inflight.text.tokenizer import Tokenizer

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
