"""Examines one class: builds a model, runs a ragged workload, and compares every token with the reference.

Exact: each token is the argmax of the reference's logits, computed without a cache; or within `NEAR_TIE` of their range
of it; or the argmax if the reference sees only the tokens before it.

Runs the same model and requests through `transformers`' own continuous batching.

Decides only its setup: room for everything, so that only its way of batching is tested.
"""

import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from inflight.census.finding import Finding, Outcome, first_line
from inflight.census.items import is_as_good
from inflight.census.sensitive import FIRST_ORDINARY_TOKEN, build, plain_logits, sensitive_model, vocab_size
from inflight.census.tiny_configs import CLASSES, model_class, tiny_config
from inflight.contracts.api.outputs import RequestOutput
from inflight.contracts.api.params import SamplingParams
from inflight.entrypoints.llm import LLM

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


NEAR_TIE = 1e-4
NUM_REQUESTS = 8
MAX_PROMPT_TOKENS = 60
NUM_SHARED_TOKENS = 20
OUTPUT_TOKENS = (12, 20)
ENGINE: dict[str, Any] = {
    "max_num_batched_tokens": 24,
    "num_blocks": 44,
    "block_size": 4,
    "max_num_seqs": 6,
    "executor": "auto",
}
"""A small token budget, so that prompts are chunked next to decodes; and few blocks, so that requests are preempted."""


DRAFT_HEADS = ("gemma4_assistant", "gemma4_unified_assistant")
"""They read the keys and values of another model, and cannot be built without one."""


@dataclass(frozen=True, slots=True)
class TriedRequest:
    """Token ids, and how many tokens to generate."""

    prompt: list[int]
    num_tokens: int


def examine(model_type: str) -> tuple[Finding, PreTrainedModel | None]:
    """Examine a class; return the finding and the model, if one could be built."""
    start = time.perf_counter()
    finding = Finding(model_type, CLASSES[model_type], "not built")
    if model_type in DRAFT_HEADS:
        reason = "it is a draft head, which reads the keys and values of its target model"
        return replace(finding, outcome="not causal", reason=reason), None
    model = None
    try:
        config = tiny_config(model_type)
        built = build(model_class(model_type), config)
        modalities = built.input_modalities
        takes = ", ".join(sorted({*([modalities] if isinstance(modalities, str) else modalities)} - {"text"}))
        finding = replace(finding, outcome="not causal", num_parameters=built.num_parameters(), takes=takes)
        model, sensitivity = sensitive_model(model_class(model_type), config)
        finding = replace(
            finding,
            outcome="failed",
            share_changed=sensitivity.share_changed,
            num_distinct=sensitivity.num_distinct,
            factor=sensitivity.factor,
        )
        finding = _run(model, finding)
    except Exception as error:
        reason = first_line(error)
        if finding.outcome == "not causal":
            reason = f"it does not run on tokens alone: {reason}"
        finding = replace(finding, reason=reason)
    return replace(finding, seconds=time.perf_counter() - start), model


def requests_for(model: PreTrainedModel, seed: int = 0) -> list[TriedRequest]:
    """Return random prompts of 1 to `MAX_PROMPT_TOKENS` tokens, the same for the same vocabulary size; the last prompt
    begins like the second."""
    draw, limit = random.Random(seed), vocab_size(model)
    lengths = [
        1,
        MAX_PROMPT_TOKENS,
        *(draw.randint(2, MAX_PROMPT_TOKENS) for _ in range(NUM_REQUESTS - 2)),
    ]
    requests = [
        TriedRequest([draw.randrange(FIRST_ORDINARY_TOKEN, limit) for _ in range(length)], draw.randint(*OUTPUT_TOKENS))
        for length in lengths
    ]
    shared = requests[1].prompt[:NUM_SHARED_TOKENS]
    return [*requests[:-1], replace(requests[-1], prompt=shared + requests[-1].prompt[NUM_SHARED_TOKENS:])]


def _run(model: PreTrainedModel, finding: Finding) -> Finding:
    requests = requests_for(model)
    why_not_causal = _why_not_causal(model, requests[1].prompt)
    try:
        llm = LLM(model, **ENGINE)
    except ValueError as error:
        outcome: Outcome = "not causal" if why_not_causal else "refused"
        return replace(finding, outcome=outcome, reason=why_not_causal or first_line(error))
    info = llm.model_info
    if why_not_causal and info.executor == "generate":
        return replace(finding, outcome="not causal", reason=f"{why_not_causal}; it runs in its own generate")
    if why_not_causal:
        return replace(finding, outcome="wrong", reason=f"the engine takes it, but {why_not_causal}")
    chunks_prompts = llm.engine.runner.executor.capabilities.chunks_prompts
    limits = ("model.generate", "every step runs in Python")
    finding = replace(
        finding,
        executor=info.executor,
        in_one_piece=not chunks_prompts,
        is_recorded=info.is_recorded,
        reason="; ".join(note for note in info.notes if note.startswith(limits)),
    )
    params = [SamplingParams(temperature=0, max_tokens=each.num_tokens, ignore_eos=True) for each in requests]
    outputs = llm.generate([each.prompt for each in requests], params, use_tqdm=False)
    finding = replace(finding, num_preemptions=llm.stats().num_preemptions)
    return judge(model, requests, outputs, finding)


@torch.no_grad()
def _why_not_causal(model: PreTrainedModel, prompt: Sequence[int]) -> str:
    """Return why the model is not a decoder-only causal language model; "" if it is one."""
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder"
    whole = plain_logits(model, torch.tensor([prompt]))
    begun = plain_logits(model, torch.tensor([prompt[: len(prompt) // 2]]))
    if whole.shape[:2] != (1, len(prompt)):
        return f"it gives logits of the shape {list(whole.shape)} for {len(prompt)} tokens"
    spread = (whole.amax() - whole.amin()).item()
    if (whole[:, : begun.shape[1]] - begun).abs().max().item() > 1e-2 * spread:
        return "what follows a token changes its logits"
    return ""


def judge(
    model: PreTrainedModel, requests: Sequence[TriedRequest], outputs: Sequence[RequestOutput], finding: Finding
) -> Finding:
    """Compare the generated tokens with the reference."""
    num_tokens = num_near_ties = 0
    wrong: list[str] = []
    for number, (request, output) in enumerate(zip(requests, outputs, strict=True)):
        tokens = list(output.outputs[0].token_ids)
        if output.error:
            return replace(finding, outcome="failed", reason=first_line(output.error))
        if len(tokens) != request.num_tokens:
            return replace(finding, outcome="failed", reason=f"{len(tokens)} tokens came of {request.num_tokens}")
        compare = otherwise_generated if finding.executor == "generate" else misplaced
        places, ties = compare(model, request.prompt, tokens)
        num_tokens, num_near_ties = num_tokens + len(tokens), num_near_ties + ties
        if places:
            wrong.append(f"{number} (prompt of {len(request.prompt)}) from output token {places[0]} on")
    finding = replace(finding, num_tokens=num_tokens, num_near_ties=num_near_ties)
    if wrong:
        return replace(finding, outcome="wrong", reason=f"{len(wrong)} of {len(requests)} requests: {'; '.join(wrong)}")
    return replace(finding, outcome="exact")


@torch.no_grad()
def misplaced(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[list[int], int]:
    """Return the indices of tokens that differ from the reference, and the number of near ties."""
    logits = plain_logits(model, torch.tensor([[*prompt, *tokens[:-1]]]))[0, len(prompt) - 1 :]
    best = logits.amax(-1)
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    finite = logits.masked_fill(~torch.isfinite(logits), 0.0)
    tolerance = NEAR_TIE * (best - finite.amin(-1))
    is_as_good = best - chosen <= tolerance
    wrong = [place for place in (~is_as_good).nonzero()[:, 0].tolist() if not _is_next(model, prompt, tokens, place)]
    return wrong, int((chosen < best).sum()) - len(wrong)


@torch.no_grad()
def otherwise_generated(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[list[int], int]:
    """As `misplaced`, of a model whose reference is its `generate`: the index of the first other token."""
    options = {"max_new_tokens": len(tokens), "do_sample": False, "output_logits": True}
    output: Any = model.generate(torch.tensor([prompt]), return_dict_in_generate=True, **options)
    plain = output.sequences[0, -len(tokens) :].tolist()
    if is_as_good(list(tokens), plain, torch.cat(output.logits)):
        return [], 0
    return [next(place for place, pair in enumerate(zip(tokens, plain, strict=True)) if len(set(pair)) > 1)], 0


def _is_next(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], place: int) -> bool:
    """Whether the reference chooses a token if it sees only the tokens before it.

    A layer that selects by rank (keys, experts) may break ties differently in a longer row.
    """
    logits = plain_logits(model, torch.tensor([[*prompt, *tokens[:place]]]))
    return int(logits[0, -1].argmax()) == tokens[place]
