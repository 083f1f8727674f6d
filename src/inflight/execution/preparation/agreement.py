"""Compares two ways of running a model: relative errors, and the tolerance for rounding."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf, isnan

import torch
from transformers import PreTrainedModel

from inflight.contracts.api.errors import ModelError


class NotFiniteError(ModelError):
    """The model's logits are not finite even when it runs alone, so no executor would help."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(
            f"the logits of {type(model).__name__} are not finite even when it runs alone: are its weights intact?"
        )


class PrepackingError(RuntimeError):
    """The model deviates from the reference after prepacking, which cannot be undone."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(f"the weights of {type(model).__name__} could not be prepacked")


@contextmanager
def as_model_error(words: str) -> Iterator[None]:
    """A context that turns other errors into `ModelError`s with this prefix."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{words}{type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest relative errors due to rounding.

    Attributes:
        attention: of an attention module's output.
        logits: of the logits, given the plain attention outputs.
        isolation: of the logits, when a neighbour in the row changes.
    """

    attention: float
    logits: float
    isolation: float

    def allows(self, attention: float, logits: float) -> bool:
        """Whether these errors exceed the tolerance nowhere; NaN exceeds it."""
        return attention <= self.attention and logits <= self.logits

    def with_noise(self, attention: float, logits: float) -> "Tolerance":
        """The tolerance for a model that amplifies rounding: at most that of low precision, or for low precision that
        of parts. (Qwen2.5-VL-3B's shape in bfloat16 on AVX2: 4e-3 and 2.5e-2.)

        Args:
            attention, logits: the relative errors caused by one more rounding.
        """
        most = LOW_PRECISION if self is FULL_PRECISION else ROUNDED_IN_PARTS
        return replace(
            self,
            attention=max(self.attention, min(NOISE_MARGIN * attention, most.attention)),
            logits=max(self.logits, min(NOISE_MARGIN * logits, most.logits)),
        )


NOISE_MARGIN = 20
"""Results may differ by this multiple of the effect of one rounding, since a model rounds in every layer."""
FULL_PRECISION = Tolerance(attention=2e-5, logits=2e-5, isolation=2e-5)
LOW_PRECISION = Tolerance(attention=3e-2, logits=1e-2, isolation=1e-3)
ROUNDED_IN_PARTS = Tolerance(attention=1e-1, logits=1e-1, isolation=1e-3)
"""For a sharded model in low precision: each partial sum is rounded. (Measured: up to 8e-3 and 1.2e-2.)"""
PREPACKED_LOW_PRECISION = Tolerance(attention=0.5, logits=0.5, isolation=1e-3)
"""For a proved, then prepacked model. In low precision prepacked layers round differently, and a sharp softmax or a
router amplifies that, so only gross mistakes can be found. (Unrelated results have an error of 1.4, zeros one of 1.)"""


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference of two tensors `[…, n]`, of any dtypes, relative to the variation of the expected
    rows."""
    expected = expected.float()
    spread = (expected - expected.mean(dim=-1, keepdim=True)).norm()
    return float((actual.float() - expected).norm() / spread.clamp_min(1e-30))


def rounded_again(states: torch.Tensor) -> torch.Tensor:
    """States `[…, n]` in which every second number is replaced by the next one of its dtype."""
    every_second = torch.arange(states.shape[-1], device=states.device) % 2
    return states * (1 + every_second * torch.finfo(states.dtype).eps).to(states.dtype)


@contextmanager
def embeddings_rounded_again(model: PreTrainedModel) -> Iterator[None]:
    """A context in which a model's embeddings are `rounded_again`."""
    hook = model.get_input_embeddings().register_forward_hook(lambda module, args, output: rounded_again(output))
    try:
        yield
    finally:
        hook.remove()


def worst(errors: Iterable[float]) -> float:
    """The largest error; NaN is larger than any number."""
    return max(errors, key=lambda error: inf if isnan(error) else error)


def precision_of(model: PreTrainedModel) -> Tolerance:
    """The tolerance for a model's arithmetic (TF32 counts as low precision)."""
    tensor_float = model.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return FULL_PRECISION if model.dtype in (torch.float32, torch.float64) and not tensor_float else LOW_PRECISION
