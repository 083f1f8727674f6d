"""Heads: applied to the body's states one text at a time, so that a text's bits do not depend on others.

An embedding's head comes from `sentence-transformers`' folders in the checkpoint. A classification's is the model's own
code, run on the packed row's hidden states in place of its body.

`TextPooler`: passes the hidden states of completed texts to the head.
"""

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions
from transformers.utils import cached_file

from inflight.contracts.api.errors import ModelError
from inflight.contracts.api.pooling import NORMALIZE, PooledText, PoolingPlan
from inflight.contracts.step.plan import Span, SpanTokens, StepPlan, StepTokens
from inflight.execution.executors.counting import TYPE_SHIFT
from inflight.execution.hf.source import first_line
from inflight.execution.ragged_batch import RaggedBatch, to_device


def read_dense(name: str, folders: Sequence[str], revision: str | None) -> dict[str, nn.Module]:
    """The dense layers of these folders of a checkpoint. Raises `ModelError` if one cannot be read.

    Args:
        name: a folder or a hub id.
    """
    layers: dict[str, nn.Module] = {}
    for folder in folders:
        try:
            config = json.loads(_path(name, f"{folder}/config.json", revision).read_text())
            try:
                state = load_file(_path(name, f"{folder}/model.safetensors", revision))
            except OSError:
                state = torch.load(_path(name, f"{folder}/pytorch_model.bin", revision), weights_only=True)
            layers[folder] = Dense(config, state)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"the layer {folder!r} of {name!r} cannot be read: {first_line(error)}") from error
    return layers


def _path(name: str, file: str, revision: str | None) -> Path:
    return Path(cached_file(name, file, revision=revision))


def _weighted_mean(states: torch.Tensor, first: int) -> torch.Tensor:
    """See `POOLERS`."""
    weights = torch.arange(1 + first, 1 + first + len(states), dtype=torch.float32, device=states.device)[:, None]
    return (states * weights).sum(0) / weights.sum()


POOLERS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "cls": lambda states, first: states[0],
    "lasttoken": lambda states, first: states[-1],
    "mean": lambda states, first: states.mean(0),
    "max": lambda states, first: states.amax(0),
    "mean_sqrt_len_tokens": lambda states, first: states.sum(0) / len(states) ** 0.5,
    "weightedmean": _weighted_mean,
}
"""Each takes the states `[L, hidden]` of the tokens that are pooled, float32, and the place of the first of them in the
text, to `[hidden]`."""


def check_modes(modes: Sequence[str]) -> None:
    """Raise `ModelError` for a mode that is not known."""
    for mode in modes:
        if mode not in POOLERS:
            raise ModelError(f"the model pools by {mode!r}; this is not one of {', '.join(POOLERS)}")


def pooled(states: torch.Tensor, modes: Sequence[str], prompt_length: int) -> torch.Tensor:
    """The vector `[len(modes) * hidden]` of a text, float32.

    Args:
        states: of all its tokens, `[L, hidden]`.
        prompt_length: how many of the first ones are not pooled.
    """
    first = min(prompt_length, len(states) - 1)
    own = states[first:].float()
    return torch.cat([POOLERS[mode](own, first) for mode in modes])


class Head(Protocol):
    """Takes a text and its hidden states `[L, hidden]` to its numbers, `[n]` float32."""

    def __call__(self, text: PooledText, states: torch.Tensor) -> torch.Tensor: ...


class EmbeddingHead:
    """Pooling and the layers after it.

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
    """A dense layer of `sentence-transformers`, float32: an activation of a linear layer, perhaps added to its input.

    Args:
        config: its `config.json`.
        state: its weights, by name: `linear.weight` `[out, in]`, `linear.bias` `[out]`, and those of `residual`, if
            any.

    Raises:
        ModelError: the weights do not fit the configuration, or the activation is not a module of torch.
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
        """`[in]` to `[out]`, float32."""
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
    """The difference of two tokens' logits after a text.

    Args:
        weight: of the model's head, `[V, hidden]` in the model's dtype; not kept.
        answers: the two tokens, the affirmative one last.
    """

    def __init__(self, weight: torch.Tensor, answers: Sequence[int]) -> None:
        self._weight = weight.detach()[list(answers)].clone()

    def __call__(self, text: PooledText, states: torch.Tensor) -> torch.Tensor:
        """See `Head`."""
        logits = nn.functional.linear(states[-1], self._weight).float()  # of the two answers
        return logits.diff()


class ClassificationHead:
    """The model's own head and code.

    Args:
        model: with a classification head; its body is removed.
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
    """Replaces a model's body; returns given states `[1, L, hidden]`."""

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler
        self.states = torch.empty(0)

    def forward(self, *args: object, **kwargs: object) -> BaseModelOutputWithPoolingAndCrossAttentions:
        pooled_states = None if self.pooler is None else self.pooler(self.states)
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=self.states, pooler_output=pooled_states)


class TextPooler:
    """Replaces sampling for a body: pools one text at a time, so that its bits depend on no other."""

    def __init__(self, head: Head, plan: PoolingPlan) -> None:
        self._head, self._plan = head, plan
        self._texts: dict[int, PooledText] = {}  # by slot

    def take(self, plan: StepPlan) -> None:
        """Track slot releases and assignments."""
        for slot in plan.released_slots:
            self._texts.pop(slot, None)
        for assignment in plan.assignments:
            assert assignment.text is not None
            self._texts[assignment.slot] = assignment.text

    def with_types(self, batch: RaggedBatch) -> RaggedBatch:
        """Add token types to a step."""
        if all(self._texts[span.slot].token_types is None for span in batch.spans):
            return batch
        types = [self._types(span) for span in batch.spans]
        shifted = to_device(np.concatenate(types) << TYPE_SHIFT, batch.positions.device)
        return replace(batch, positions=batch.positions + shifted)

    def _types(self, span: Span) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """A span's token types, `[n]` int64; zeros if its text has none."""
        types = self._texts[span.slot].token_types or [0] * span.end
        return np.asarray(types[span.start : span.end], dtype=np.int64)

    @torch.inference_mode()
    def pool(self, batch: RaggedBatch, states: torch.Tensor) -> StepTokens:
        """The numbers of each text whose last token has run.

        Args:
            states: `[R, hidden]` of the step's logit rows, in the body's dtype.
        """
        rows = states.split([span.num_logit_rows for span in batch.spans])  # type: ignore[no-untyped-call]
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a head's work is too small for several threads
        try:
            return [self._of_span(span, own) for span, own in zip(batch.spans, rows, strict=True)]
        finally:
            torch.set_num_threads(num_threads)

    def _of_span(self, span: Span, states: torch.Tensor) -> SpanTokens:
        """The numbers of a span's text from its states `[num_logit_rows, hidden]`; none before its last token has
        run."""
        text = self._texts[span.slot]
        if span.end < len(text.token_ids):
            return SpanTokens([])
        if not self._plan.runs_whole(text):
            text = PooledText(text.token_ids[-1:])
        return SpanTokens([], values=array("f", self._head(text, states).float().cpu().numpy().tobytes()))
