"""When two ways of running a model agree: relative errors, and what rounding explains of them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, isnan

import torch
from transformers import PreTrainedModel

from inflight.contracts.errors import ModelError


class NotFiniteError(ModelError):
    """A model gives no numbers even when it runs alone: no other way of running it will help."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(
            f"the logits of {type(model).__name__} are not finite even when it runs alone: are its weights intact?"
        )


@contextmanager
def as_model_error(words: str) -> Iterator[None]:
    """Inside, any error becomes a `ModelError` that begins with these words; one that is a `ModelError` stays."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{words}{type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest relative errors that rounding explains."""

    attention: float
    logits: float
    isolation: float


FULL_PRECISION = Tolerance(attention=2e-5, logits=2e-5, isolation=2e-5)
LOW_PRECISION = Tolerance(attention=3e-2, logits=1e-2, isolation=1e-3)
ROUNDED_ANEW = Tolerance(attention=5e-1, logits=5e-1, isolation=1e-3)
"""After the proof the weights are prepacked. In low precision that rounds what attention sees differently, and a sharp
softmax or a router makes much of it: only a mistake, which changes everything, is looked for."""


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to how much the expected values vary within rows."""
    expected = expected.float()
    spread = (expected - expected.mean(dim=-1, keepdim=True)).norm()
    return float((actual.float() - expected).norm() / spread.clamp_min(1e-30))


def worst(errors: Iterable[float]) -> float:
    """The largest; one that is not a number is larger than any."""
    return max(errors, key=lambda error: inf if isnan(error) else error)


def precision_of(model: PreTrainedModel) -> Tolerance:
    """What rounding explains in the dtype that a model runs in."""
    tensor_float = model.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return FULL_PRECISION if model.dtype in (torch.float32, torch.float64) and not tensor_float else LOW_PRECISION
