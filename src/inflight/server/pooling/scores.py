"""Jina's and Cohere's `/v1/rerank`, and vLLM's `/v1/score`."""

from typing import Annotated, Any, ClassVar

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from inflight.contracts.api.outputs import ScoreOutput
from inflight.server.pooling.running import PoolingBody, answer_of, head, pooled, usage_of
from inflight.server.serving.service import service_of
from inflight.server.wire.json_route import json_response
from inflight.server.wire.strict_model import Many, StrictModel

OF_OTHERS = {"prompt", "stream", "max_tokens", "input", "dimensions", "encoding_format", "task"}


class Document(StrictModel):
    """A document as an object."""

    text: str


class RerankRequest(PoolingBody):
    """The body of a request.

    Attributes:
        documents: texts, or objects with a `text`.
        top_n: return only this many of the best; null: all.
        return_documents: whether the answer has their texts.
        truncate_prompt_tokens: the most tokens of query and document together, beyond which they are cut (-1: the
            model's limit); null: longer ones are refused.
        instruction: the reranking task, for models that support it.
    """

    NOT_SUPPORTED: ClassVar = {"max_tokens_per_doc": (), "rank_fields": ([], ["text"]), "max_chunks_per_doc": (1,)}
    OF_OTHERS: ClassVar = {*OF_OTHERS, "text_1", "text_2"}

    query: str
    documents: Many[str | Document]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    instruction: str | None = None


class ScoreRequest(PoolingBody):
    """The body of a request.

    Attributes:
        text_1, text_2: texts: one of the first with each of the second, or each with its counterpart.
        instruction: as in `RerankRequest`.
    """

    OF_OTHERS: ClassVar = {*OF_OTHERS, "query", "documents"}

    text_1: str | Many[str]
    text_2: str | Many[str]
    instruction: str | None = None


async def rerank(body: RerankRequest, request: Request) -> Response:
    """Rank documents for a query, the best first."""
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    outputs = await pooled(
        request,
        body.model,
        texts,
        "documents",
        lambda llm: llm.score(
            body.query,
            texts,
            instruction=body.instruction,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
        ),
    )
    ranked = sorted(enumerate(outputs), key=lambda each: -each[1].score)[: body.top_n]
    results = [_result(index, output, texts[index] if body.return_documents else None) for index, output in ranked]
    usage = usage_of(outputs)
    service, tokens = service_of(request), {"input_tokens": usage["prompt_tokens"]}
    answer = {
        "id": head(request, "rerank")["id"],
        "model": service.settings.model_name,
        "results": results,
        "usage": usage,
        "meta": {"api_version": {"version": "2"}, "tokens": tokens},
    }
    return json_response(answer)


async def score(body: ScoreRequest, request: Request) -> Response:
    """A score for each pair of texts."""
    first, second = ([each] if isinstance(each, str) else each for each in (body.text_1, body.text_2))
    outputs = await pooled(
        request,
        body.model,
        second,
        "text_2",
        lambda llm: llm.score(
            first, second, instruction=body.instruction, truncate_prompt_tokens=body.truncate_prompt_tokens
        ),
    )
    data = [{"index": index, "object": "score", "score": output.score} for index, output in enumerate(outputs)]
    return answer_of(request, "score", data, outputs)


def _result(index: int, output: ScoreOutput, text: str | None) -> dict[str, Any]:
    result: dict[str, Any] = {"index": index, "relevance_score": output.score}
    return result if text is None else result | {"document": {"text": text}}
