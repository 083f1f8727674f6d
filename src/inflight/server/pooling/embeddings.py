"""OpenAI's `/v1/embeddings` and vLLM's `/pooling`: vectors of texts.

vLLM's `/classify`.
"""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from inflight.contracts.api.outputs import ClassificationOutput, EmbeddingOutput
from inflight.contracts.api.pooling import Values
from inflight.entrypoints.async_llm import AsyncLLM
from inflight.server.pooling.running import PoolingBody, Texts, answer_of, as_list, pooled, usage_of
from inflight.server.serving.service import service_of
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.json_route import json_response
from inflight.server.wire.off_loop import off_loop

BYTES_OF_NUMBER = 20
"""Approximate bytes of a number in JSON."""


class EmbeddingRequest(PoolingBody):
    """The body of a request.

    Attributes:
        input: a text, token ids, or a list of either.
        encoding_format: "base64" is that of 32-bit floats, the lowest byte first.
        dimensions: keep only this many first numbers of a vector; null: all.
        prompt_name: of the model's own prompts, which texts then begin with; null: its default one, if it has one.
    """

    NOT_SUPPORTED: ClassVar = {
        "add_special_tokens": (True,),
        "normalize": (True,),
        "messages": (),
        "embed_dtype": ("float32",),
    }
    OF_OTHERS: ClassVar = {*("prompt", "stream", "max_tokens", "documents", "query", "text_1", "text_2", "task")}

    input: Texts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    prompt_name: str | None = None


async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """The vectors of texts."""
    outputs = await _embedded(body, request)

    def answer() -> Response:
        data = [
            {"object": "embedding", "index": index, "embedding": _written(output.embedding, body)}
            for index, output in enumerate(outputs)
        ]
        name = service_of(request).settings.model_name
        content = {"object": "list", "data": data, "model": name, "usage": usage_of(outputs)}
        return json_response(content)

    return await off_loop(_size(outputs), answer)


async def pooling(body: EmbeddingRequest, request: Request) -> Response:
    """Pool texts: vectors, or the probabilities of labels."""
    plan = (await service_of(request).model_info()).pooling
    outputs: Sequence[EmbeddingOutput | ClassificationOutput]
    if plan is not None and plan.task == "classify":
        outputs = await _classified(body, request)
    else:
        outputs = await _embedded(body, request)

    def answer() -> Response:
        values = [each.embedding if isinstance(each, EmbeddingOutput) else each.probs for each in outputs]
        data = [{"index": index, "object": "pooling", "data": _written(own, body)} for index, own in enumerate(values)]
        return answer_of(request, "pool", data, outputs)

    return await off_loop(_size(outputs), answer)


async def _embedded(body: EmbeddingRequest, request: Request) -> list[EmbeddingOutput]:
    texts = as_list(body.input)

    async def run(llm: AsyncLLM) -> list[EmbeddingOutput]:
        return await llm.embed(
            texts,
            prompt_name=body.prompt_name,
            dimensions=body.dimensions,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
        )

    return await pooled(request, body.model, texts, "input", run)


async def _classified(body: EmbeddingRequest, request: Request) -> list[ClassificationOutput]:
    for name in ("dimensions", "prompt_name"):
        if getattr(body, name) is not None:
            raise ApiError(400, f"{name} is given; this model gives labels, not vectors", param=name)
    texts = as_list(body.input)
    return await pooled(
        request,
        body.model,
        texts,
        "input",
        lambda llm: llm.classify(texts, truncate_prompt_tokens=body.truncate_prompt_tokens),
    )


def _written(values: Values, body: EmbeddingRequest) -> Any:
    return base64.b64encode(values.tobytes()).decode() if body.encoding_format == "base64" else list(values)


def _size(outputs: Sequence[EmbeddingOutput | ClassificationOutput]) -> int:
    """The approximate bytes of the answer."""
    each = len(outputs[0].embedding if isinstance(outputs[0], EmbeddingOutput) else outputs[0].probs)
    return len(outputs) * each * BYTES_OF_NUMBER


class ClassifyRequest(PoolingBody):
    """The body of a request.

    Attributes:
        input: a text, token ids, or a list of either.
    """

    NOT_SUPPORTED: ClassVar = {"activation": (True,), "use_activation": (True,), "messages": ()}
    OF_OTHERS: ClassVar = {"prompt", "stream", "max_tokens", "documents", "query", "text_1", "text_2", "dimensions"}

    input: Texts


async def classify(body: ClassifyRequest, request: Request) -> Response:
    """The probabilities of a classifier's labels."""
    texts = as_list(body.input)
    outputs = await pooled(
        request,
        body.model,
        texts,
        "input",
        lambda llm: llm.classify(texts, truncate_prompt_tokens=body.truncate_prompt_tokens),
    )
    data = [
        {"index": index, "label": output.label, "probs": list(output.probs), "num_classes": len(output.probs)}
        for index, output in enumerate(outputs)
    ]
    return answer_of(request, "classify", data, outputs)
