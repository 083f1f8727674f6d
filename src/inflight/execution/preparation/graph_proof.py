"""Proves that a compiled graph gives the bits of the traced model."""

import logging
from array import array
from collections.abc import Iterator, Sequence

import torch
import xxhash

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.step.plan import Span, StepPlan
from inflight.execution.executors import Executor, PackedExecutor
from inflight.execution.graph.encode import encode
from inflight.execution.graph.trace import UntraceableError
from inflight.execution.preparation.attention_calls import num_embeddings
from inflight.execution.preparation.proof import draw_prompts
from inflight.execution.ragged_batch import RaggedBatch

logger = logging.getLogger(__name__)

PROMPT_LENGTH = 10
"""Tokens. All but the last run together, and then that one."""


def prove_graph(executor: PackedExecutor, config: EngineConfig, num_blocks: int) -> str | None:
    """Trace an executor's model, and run its compiled graph if that gives the same bits. Its cache must be unused.
    Returns why it runs eagerly; None: it runs the graph."""
    in_two = executor.capabilities.chunks_prompts
    batches = list(_batches(executor, config.kv_cache.block_size, num_blocks, in_two=in_two))
    eager = [executor.outputs(batch) for batch in batches]
    try:
        graph = executor.trace(config.scheduling.max_num_batched_tokens)
    except UntraceableError as error:
        return str(error)
    reason = ""
    for fuses in (True, False):
        try:
            executor.run_program(encode(graph, fuses=fuses))
            if all(_are_equal(executor.outputs(batch), each) for batch, each in zip(batches, eager, strict=True)):
                return None
            reason = "the recorded forward pass gives other bits"
        except Exception as error:
            logger.debug("the compiled forward pass failed", exc_info=True)
            reason = f"the recorded forward pass fails: {str(error).strip().splitlines()[0]}"
    executor.run_eagerly()
    return reason


@torch.inference_mode()
def digest_of_step(executor: Executor, block_size: int, num_blocks: int) -> bytes:
    """A digest of the bits of an executor's logits for a few tokens: 16 bytes. Its cache must be unused."""
    (batch,) = _batches(executor, block_size, num_blocks, in_two=False)
    logits = executor.forward(batch)
    executor.release([0])
    return xxhash.xxh3_128_digest(logits.cpu().contiguous().view(torch.uint8).numpy().data)


def _are_equal(outputs: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether two runs' outputs, each `[n, …]`, are equal."""
    return all(torch.equal(each, other) for each, other in zip(outputs, others, strict=True))


def _batches(executor: Executor, block_size: int, num_blocks: int, *, in_two: bool) -> Iterator[RaggedBatch]:
    """A prompt in one step or in two, with all logits."""
    needed = min(num_blocks, -(-PROMPT_LENGTH // block_size))
    # With fewer blocks, groups read each other's: the same each time, as required.
    tables = [
        array("i", ((group * needed + number) % num_blocks for number in range(needed)))
        for group in range(len(executor.cache_groups))
    ]
    length = min(PROMPT_LENGTH, needed * block_size)
    (prompt,) = draw_prompts(num_embeddings(executor.model), [length])
    for start, end in ((0, length - 1), (length - 1, length)) if in_two else ((0, length),):
        if start < end:
            span = Span(0, 0, start, list(prompt[start:end]), end - start, length)
            plan = StepPlan((span,), tuple((table,) for table in tables))
            yield RaggedBatch.from_plan(plan, block_size, executor.model.device)
