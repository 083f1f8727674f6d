"""`GenerateExecutor`: leaves every sequence to the model's own `generate`. See `GeneratedSequences`."""

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

from inflight.contracts.step.cache_layout import ALL_TOKENS
from inflight.execution.executors.interface import Capabilities
from inflight.execution.ragged_batch import RaggedBatch


class GenerateExecutor:
    """For models that run in no other way, such as encoder-decoders: it runs nothing itself.

    Args:
        vocab_size: V, the columns of logits.
    """

    name = "generate"
    cache_groups = (ALL_TOKENS,)
    bytes_per_slot = bytes_per_state = 0
    capabilities = Capabilities(shares_prefixes=False, chunks_prompts=False)

    def __init__(self, model: PreTrainedModel, vocab_size: int) -> None:
        self.model = model
        self._no_logits = torch.empty(0, vocab_size, dtype=model.dtype, device=model.device)

    def bytes_per_block(self, block_size: int) -> int:
        """See `Executor`. The size of the model's own caches is unknown."""
        return 0

    def allocate(self, num_blocks: int, num_states: int = 0) -> None:
        """See `Executor`."""

    def release(self, slots: Iterable[int]) -> None:
        """See `Executor`."""

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """See `Executor`."""
        return self._no_logits
