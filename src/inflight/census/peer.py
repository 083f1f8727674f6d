"""Runs the same model and requests through `transformers`' own continuous batching.

Decides only its setup: room for everything, so that only its way of batching is tested.
"""

import logging
from dataclasses import replace

from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from inflight.census.examine import misplaced, requests_for
from inflight.census.finding import Finding, first_line

NUM_TOKENS = 16
SETTING = {
    "page_size": 32,
    "num_blocks": 64,
    "max_batch_tokens": 128,
    "max_requests_per_batch": 6,
    "use_cuda_graph": False,
    "use_async_batching": False,
}


def with_peer(model: PreTrainedModel, finding: Finding) -> Finding:
    """Return `finding` with `peer` filled in."""
    try:
        return replace(finding, peer=_peer(model))
    except Exception as error:
        return replace(finding, peer=f"raises {first_line(error)}")


def _peer(model: PreTrainedModel) -> str:
    requests, errors = requests_for(model), _Errors()
    for name in ("transformers", "ContinuousBatchingLogger"):
        logging.getLogger(name).addHandler(errors)
    outputs = model.generate_batch(
        [each.prompt for each in requests],
        generation_config=GenerationConfig(max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(**SETTING),
        progress_bar=False,
    )
    results = list(outputs.values())
    failed = next((each.error for each in results if each.error), errors.first)
    if failed or len(results) < len(requests):
        return f"raises {first_line(failed or 'nothing, and gives no answer')}"
    num_wrong = sum(
        bool(misplaced(model, request.prompt, result.generated_tokens)[0])
        for request, result in zip(requests, results, strict=True)
    )
    return f"wrong in {num_wrong} of {len(requests)}" if num_wrong else "right"


class _Errors(logging.Handler):
    """Keeps the first logged error, because the peer's thread does not raise errors to its caller."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.first = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.first = self.first or (str(record.exc_info[1]) if record.exc_info else "") or record.getMessage()
