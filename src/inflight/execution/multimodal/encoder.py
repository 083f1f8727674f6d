"""`Encoder`: runs a model's image and sound encoders, one item at a time."""

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from inflight.contracts.api.errors import ModelError
from inflight.contracts.step.multimodal import EncoderInput, placeholder_id
from inflight.execution.hf.model_call import forward_parameters
from inflight.execution.hf.model_class import encoders
from inflight.execution.multimodal.sequence_inputs import as_tensor

OF_ITEMS = ("pooler_output", "last_hidden_state", "hidden_states", "attentions")
DEEP = "deepstack_features"
"""Fields of an encoder's output with a row for each placeholder, or internal to it."""
OUTPUTS = "mm_encoder_outputs"
"""The argument of models that take encoder outputs."""
KINDS = ("image", "audio")


@dataclass(frozen=True, slots=True)
class Rows:
    """An item's encoder output: a row `[hidden]` for each placeholder, and in some models one for each of a few layers
    (DeepStack; None: the model has no such output).

    Attributes:
        kind: the class of the model's output.
        is_list: whether the model gives a list of one tensor for each item.
        others: further tensors of the output, which do not depend on the item.
    """

    pooled: Tensor
    deep: tuple[Tensor, ...] | None
    kind: type[ModelOutput]
    is_list: bool
    others: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        """Of its memory."""
        return sum(each.nbytes for each in (self.pooled, *(self.deep or ())))


Part: TypeAlias = tuple[Rows, slice, Tensor]
"""An item's rows, which of them, and at which tokens of a step, `[n]` int64."""


class Encoder:
    """The encoders of a model, which is exclusively ours."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._like: dict[str, Rows] = {}  # by kind, without rows: what is the same for all items

    def takes_outputs(self, kind: str) -> bool:
        """Whether the model takes outputs of this kind as `mm_encoder_outputs`."""
        return kind == "image" and OUTPUTS in forward_parameters(self._model)

    @torch.inference_mode()
    def encode(self, item: EncoderInput) -> Rows:
        """An item's rows. Raises `ModelError` if they are not as many as its placeholders, and what the model does."""
        for weight in (each for part in encoders(self._model) for each in part.state_dict(keep_vars=True).values()):
            # Not what no checkpoint has, such as rotary frequencies: `generate` has these in float32, too.
            weight.data = weight.data.to(self._model.dtype if weight.is_floating_point() else weight.dtype)
        encode = getattr(self._model.base_model, f"get_{item.kind}_features")
        output = encode(**self.arguments(item, inspect.signature(encode).parameters), return_dict=True)
        pooled, deep = output.get("pooler_output", output.get("last_hidden_state")), getattr(output, DEEP, None)
        others = {name: each for name, each in output.items() if name not in (*OF_ITEMS, DEEP)}
        layers = None if deep is None else tuple(map(_flat, deep))
        rows = Rows(_flat(pooled), layers, type(output), not isinstance(pooled, Tensor), others)
        if len(rows.pooled) != len(item.places):
            raise ModelError(
                f"an {item.kind} has {len(item.places)} placeholders, but {len(rows.pooled)} encoder outputs"
            )
        if item.kind not in self._like:
            deep = None if rows.deep is None else tuple(each[:0].clone() for each in rows.deep)
            self._like[item.kind] = replace(rows, pooled=rows.pooled[:0].clone(), deep=deep)
        return rows

    def arguments(self, item: EncoderInput, names: Collection[str]) -> dict[str, Tensor]:
        """The arguments with these names that an item gives to a function of the model."""
        given = {name: as_tensor(each) for name, each in item.arrays.items() if name in names}
        return {name: each.to(self._model.dtype) if each.is_floating_point() else each for name, each in given.items()}

    def is_deep(self, kind: str) -> bool:
        """Whether the model adds encoder outputs to the hidden states of further layers, too (DeepStack)."""
        return self._like[kind].deep is not None

    def outputs(self, kind: str, parts: Sequence[Part], input_ids: Tensor) -> ModelOutput:
        """The model's encoder output for the placeholders of one step, `input_ids` `[T]` int64. Those without an item,
        which a text may have, too, keep their own embedding."""
        like = self._like[kind]
        token_id = placeholder_id(self._model.config, kind)
        assert token_id is not None
        places = torch.eq(input_ids, token_id).nonzero()[:, 0]
        pooled = self._model.get_input_embeddings()(input_ids[places]).to(like.pooled.dtype)
        deep = [each.new_zeros(len(places), each.shape[1]) for each in like.deep or ()]
        for rows, which, where in parts:
            index = torch.searchsorted(places, where)
            pooled[index] = rows.pooled[which]
            for target, source in zip(deep, rows.deep or (), strict=True):
                target[index] = source[which]
        contained = (lambda rows: [rows]) if like.is_list else (lambda rows: rows[None])
        given: dict[str, Any] = dict.fromkeys(("last_hidden_state", "pooler_output"), contained(pooled))
        if like.deep is not None:
            given[DEEP] = [contained(each) for each in deep]
        return like.kind(**given, **like.others)

    @contextmanager
    def answering(self, kind: str, outputs: ModelOutput) -> Iterator[None]:
        """A context in which the model, asked to encode, returns these outputs."""
        name = f"get_{kind}_features"
        setattr(self._model.base_model, name, lambda *_, **__: outputs)
        try:
            yield
        finally:
            delattr(self._model.base_model, name)


def _flat(features: Any) -> Tensor:
    """Features as rows `[n, hidden]`."""
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in features])


def encodable(model: PreTrainedModel) -> tuple[str, ...]:
    """What a model encodes, besides text: "image", "audio"."""
    encoded = [kind for kind in KINDS if hasattr(model.base_model, f"get_{kind}_features")]
    return tuple(kind for kind in encoded if placeholder_id(model.config, kind) is not None)
