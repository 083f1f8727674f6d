"""vLLM's `/classify`."""

from typing import ClassVar

from fastapi import Request
from starlette.responses import Response

from inflight.server.pooling.running import Texts, TruncatePromptTokens, as_list, head, pooled, usage_of
from inflight.server.wire.json_route import to_json
from inflight.server.wire.strict_model import StrictModel


class ClassifyRequest(StrictModel):
    """The body of a request.

    Attributes:
        input: a text, token ids, or a list of either.
        truncate_prompt_tokens: the most tokens of a text, beyond which it is cut (-1: the model's limit); null: a
            longer one is refused.
    """

    IGNORED: ClassVar = {"user", "priority", "request_id"}
    NOT_SUPPORTED: ClassVar = {"activation": (True,), "use_activation": (True,), "messages": ()}
    MAY_HAVE_MORE = True
    OF_OTHERS: ClassVar = {"prompt", "stream", "max_tokens", "documents", "query", "text_1", "text_2", "dimensions"}

    model: str | None = None
    input: Texts
    truncate_prompt_tokens: TruncatePromptTokens | None = None


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
    answer = {**head(request, "classify"), "data": data, "usage": usage_of(outputs)}
    return Response(to_json(answer), media_type="application/json")
