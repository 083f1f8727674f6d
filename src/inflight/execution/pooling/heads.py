"""Heads: what comes after a model's body, one text at a time, so that a text's bits do not depend on others.

An embedding's head is what `sentence-transformers` has in the checkpoint's folders. A classification's is the model's
own code, which is given the hidden states that the packed row has computed in place of its body.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from inflight.contracts.errors import ModelError
from inflight.contracts.pooling import NORMALIZE, PooledText, PoolingPlan
from inflight.execution.pooling.poolers import pooled


class Head(Protocol):
    """Takes a text and its hidden states `[L, H]` to its numbers, `[n]` float32."""

    def __call__(self, text: PooledText, states: torch.Tensor) -> torch.Tensor: ...


class EmbeddingHead:
    """Pooling, and the layers that follow it.

    Args:
        dense: the layers of the plan that are not `NORMALIZE`, by their folders.
    """

    def __init__(self, plan: PoolingPlan, dense: dict[str, nn.Module]) -> None:
        self._plan, self._dense = plan, dense

    def __call__(self, text: PooledText, states: torch.Tensor) -> torch.Tensor:
        """See `Head`."""
        vector = pooled(states, self._plan.modes, 0 if self._plan.includes_prompt else text.prompt_length)
        for layer in self._plan.layers:
            vector = nn.functional.normalize(vector, dim=0) if layer == NORMALIZE else self._dense[layer](vector)
        return vector


class Dense(nn.Module):
    """A dense layer of `sentence-transformers`: an activation of a linear layer, perhaps added to its input.

    Args:
        config: its `config.json`.
        state: its weights, by name.
    """

    def __init__(self, config: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        sizes = config["in_features"], config["out_features"]
        self.linear = nn.Linear(*sizes, bias=config.get("bias", True))
        self.activation = _activation(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
        self.residual: nn.Module | None = None
        if config.get("use_residual"):
            self.residual = nn.Identity() if sizes[0] == sizes[1] else nn.Linear(*sizes, bias=False)
        own = {name: weight for name, weight in state.items() if name.startswith(("linear.", "residual."))}
        try:
            self.load_state_dict(own)
        except RuntimeError as error:
            raise ModelError(f"a dense layer's weights do not fit its configuration: {error}") from error
        self.float().eval().requires_grad_(False)

    def forward(self, vector: torch.Tensor) -> torch.Tensor:
        """`[in]` to `[out]`."""
        out: torch.Tensor = self.activation(self.linear(vector))
        return out if self.residual is None else out + self.residual(vector)


def _activation(name: str) -> nn.Module:
    """The module of torch that has this full name. Raises `ModelError` for any other code."""
    kind = getattr(nn, name.rpartition(".")[2], None) if name.startswith("torch.nn.") else None
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ModelError(f"a dense layer's activation is {name!r}; it must be a module of torch.nn")
    activation: nn.Module = kind()
    return activation


class AnswerHead:
    """How much likelier a causal language model finds one token than another after a text: the difference of their
    logits.

    Args:
        weight: of the model's head, `[V, H]`.
        answers: the two tokens, the affirmative one last.
    """

    def __init__(self, weight: torch.Tensor, answers: Sequence[int]) -> None:
        self._weight = weight.detach()[list(answers)].clone()

    def __call__(self, text: PooledText, states: torch.Tensor) -> torch.Tensor:
        """See `Head`."""
        logits = nn.functional.linear(states[-1], self._weight).float()  # of the two answers
        return logits.diff()


class ClassificationHead:
    """The model's own head, run by the model's own code.

    Args:
        model: with a classification head; its body is taken out of it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._given = _GivenStates(getattr(model.base_model, "pooler", None))
        setattr(model, model.base_model_prefix, self._given)
        self._model = model

    def __call__(self, text: PooledText, states: torch.Tensor) -> torch.Tensor:
        """See `Head`."""
        self._given.states = states[None]
        input_ids = torch.tensor([text.token_ids], device=states.device)
        logits: torch.Tensor = self._model(input_ids=input_ids, return_dict=True).logits[0]
        return logits.float()


class _GivenStates(nn.Module):
    """Stands in for a model's body, and gives states `[1, L, H]` that are known already."""

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler
        self.states = torch.empty(0)

    def forward(self, *args: object, **kwargs: object) -> BaseModelOutputWithPoolingAndCrossAttentions:
        pooled_states = None if self.pooler is None else self.pooler(self.states)
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=self.states, pooler_output=pooled_states)
