"""Bit masks applied to logits."""

import numpy as np
import pytest
import torch

from inflight.execution.sampling.sampler import apply_mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 1000])
def test_only_set_bits_keep_their_logits(vocab_size: int, dtype: torch.dtype) -> None:
    generator = np.random.default_rng(0)
    is_allowed = generator.random((5, vocab_size)) < 0.3
    is_allowed[0], is_allowed[1] = True, False
    padded = np.zeros((5, -(-vocab_size // 32) * 32), dtype=bool)
    padded[:, :vocab_size] = is_allowed
    padded[2, vocab_size:] = True  # bits beyond the vocabulary are ignored
    words = np.array(
        [[sum(int(bit) << i for i, bit in enumerate(word)) for word in row.reshape(-1, 32)] for row in padded],
        dtype=np.uint32,
    ).view(np.int32)
    logits = torch.randn(5, vocab_size).to(dtype)
    logits[3, ::3] = torch.tensor([-torch.inf]).to(dtype)
    expected = logits.masked_fill(~torch.from_numpy(is_allowed), -torch.inf)
    wide = torch.randn(5, vocab_size + 3).to(dtype)
    wide[:, :vocab_size] = logits
    apply_mask(logits, torch.from_numpy(words))
    assert torch.equal(logits, expected)
    beside = wide[:, vocab_size:].clone()
    apply_mask(wide[:, :vocab_size], torch.from_numpy(words))
    assert torch.equal(wide[:, :vocab_size], expected), "a view is written, too"
    assert torch.equal(wide[:, vocab_size:], beside)


def test_masking_does_not_hide_a_nan() -> None:
    """A row with a NaN in any position must be detected."""
    logits = torch.tensor([[torch.nan, 1.0, torch.nan, 2.0]])
    apply_mask(logits, torch.tensor([[0b0011]], dtype=torch.int32))
    assert logits.isnan().tolist() == [[True, False, True, False]]
    assert logits[0, [1, 3]].tolist() == [1.0, -torch.inf]
