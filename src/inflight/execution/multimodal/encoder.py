"""Runs a model's encoders of images, sounds and videos, one item at a time."""

import inspect
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import msgspec
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import ModelOutput

from inflight.contracts.step.multimodal import KINDS, EncoderInput, placeholder_id
from inflight.execution.hf.model_call import forward_parameters
from inflight.execution.hf.model_class import encoders
from inflight.execution.multimodal.sequence_inputs import as_argument

DEEP = "deepstack_features"
"""The field of an encoder's output with rows for each of a few layers."""
MASK = "attention_mask"
"""The field that tells which rows are no padding (Gemma 4's sounds)."""
WITHIN = ("hidden_states", "attentions")
"""Fields of the encoder's own layers."""
ARGUMENTS = {
    "image": ("pixel_values", "_patches"),
    "audio": ("input_features", "input_values"),
    "video": ("pixel_values_videos",),
}
"""Endings of the names of a model's arguments for each kind of item."""
OUTPUTS = "mm_encoder_outputs"
"""The argument of models that take encoder outputs."""

Rows: TypeAlias = Mapping[int, Tensor]
"""An item's encoder output: rows `[n, hidden]`, one for each placeholder, by layer: 0 in place of the input embeddings,
k to be added to the k-th layer's output (DeepStack)."""
Part: TypeAlias = tuple[Rows, slice, Tensor]
"""An item's rows, which of them, and at which tokens of a step, `[n]` int64."""


@torch.inference_mode()
def encode(model: PreTrainedModel, item: EncoderInput) -> ModelOutput:
    """The output of a model's encoder for an item. The model is exclusively ours. Raises what the encoder does."""
    load_encoders(model)
    if (features := getattr(model.base_model, f"get_{item.kind}_features", None)) is not None:
        given = arguments(model, item, inspect.signature(features).parameters)
        output: ModelOutput = features(**given, return_dict=True)
        hidden_size = model.get_input_embeddings().weight.shape[1]
        if all(each.shape == (len(item.places), hidden_size) for each in rows_of(output).values()):
            return output
    return _caught(model, item)


def load_encoders(model: PreTrainedModel) -> None:
    """Bring the weights of a model's encoders to its dtype."""
    for weight in (each for part in encoders(model) for each in part.state_dict(keep_vars=True).values()):
        # Not what no checkpoint has, such as rotary frequencies: `generate` has these in float32, too.
        weight.data = weight.data.to(model.dtype if weight.is_floating_point() else weight.dtype)


class CaughtOutput(BaseModelOutputWithPooling):  # type: ignore[misc]
    """The input embeddings of the language model, after the model has put an item in place of its tokens."""


class _Caught(Exception):
    """Ends a forward pass before its language model runs."""


def _caught(model: PreTrainedModel, item: EncoderInput) -> CaughtOutput:
    """What the model puts in place of the tokens of an item, in a prompt of nothing else: what its encoder gives is
    projected or padded, or has no function of its own."""
    found: list[Tensor] = []
    thread = threading.get_ident()  # steps may run in another one meanwhile

    def catch(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == thread:
            found.append(kwargs["inputs_embeds"])
            raise _Caught

    hook = model.get_decoder().register_forward_pre_hook(catch, with_kwargs=True)
    row = torch.full((1, len(item.places)), placeholder_id(model.config, item.kind) or 0)
    try:
        with suppress(_Caught):
            model(input_ids=row, use_cache=False, **arguments(model, item, forward_parameters(model)))
    finally:
        hook.remove()
    return CaughtOutput(pooler_output=found[0])


def arguments(model: PreTrainedModel, item: EncoderInput, names: Collection[str]) -> dict[str, Any]:
    """The arguments with these names that an item gives to a function of the model."""
    return {name: as_argument(each, model.dtype) for name, each in item.arrays.items() if name in names}


@contextmanager
def answering(model: PreTrainedModel, kind: str, output: ModelOutput) -> Iterator[None]:
    """A context in which the model, asked to encode, returns this output."""
    name = f"get_{kind}_features"
    setattr(model.base_model, name, lambda *_, **__: output)
    try:
        yield
    finally:
        delattr(model.base_model, name)


def rows_of(output: ModelOutput) -> Rows:
    """The rows in an encoder's output."""
    rows = {}
    if (pooled := output.get("pooler_output", output.get("last_hidden_state"))) is not None:
        mask = output.get(MASK)
        rows[0] = _flat(pooled if mask is None else pooled[mask])
    for number, each in enumerate(output.get(DEEP) or (), start=1):
        layer, features = each if isinstance(each[0], int) else (number, each)  # Granite Vision names the layer
        rows[layer] = _flat(features)
    rows.setdefault(0, torch.zeros_like(next(iter(rows.values()))))
    return rows


class _SavedRows(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    rows: dict[int, bytes]


def to_bytes(rows: Rows) -> bytes:
    """An encoder output as a file holds it."""
    as_bytes = {layer: each.contiguous().view(torch.uint8).numpy().tobytes() for layer, each in rows.items()}
    first = rows[0]
    return msgspec.msgpack.encode(_SavedRows(str(first.dtype).removeprefix("torch."), tuple(first.shape), as_bytes))


def from_bytes(data: bytearray) -> Rows:
    """The encoder output in a file."""
    saved = msgspec.msgpack.decode(data, type=_SavedRows)
    dtype: torch.dtype = getattr(torch, saved.dtype)
    return {
        layer: torch.frombuffer(bytearray(each), dtype=dtype).reshape(saved.shape) for layer, each in saved.rows.items()
    }


def num_deep_layers(model: PreTrainedModel) -> int:
    """The number of first layers whose outputs encoder outputs are added to."""
    config = model.config
    vision = getattr(config, "vision_config", None)
    indexes = [getattr(each, "deepstack_visual_indexes", None) or () for each in (config, vision)]
    layers: list[int] = [layer for _, layer in getattr(config, "deepstack_layer_map", None) or ()]
    layers += getattr(config, "spatial_target_layers", None) or ()
    return max(*map(len, indexes), *layers)


def _flat(features: Any) -> Tensor:
    """Features as rows `[n, hidden]`."""
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in features])


def output_of(like: ModelOutput, rows: Rows, number: int) -> ModelOutput:
    """An encoder's output with these rows, for this many equal items; all else as in `like`."""
    num_rows = len(rows[0])

    def contained(value: Any, layer: int) -> Any:
        if isinstance(value, Tensor):
            return (torch.cat if value.dim() == 2 else torch.stack)([rows[layer]] * number)
        return [rows[layer]] * number

    given = {name: each for name, each in like.items() if name not in WITHIN}
    for name in given.keys() & {"pooler_output", "last_hidden_state"}:
        given[name] = contained(given[name], 0)
    if MASK in given:
        given[MASK] = torch.ones(number, num_rows, dtype=torch.bool)
    if DEEP in given:
        layers = enumerate(given[DEEP], start=1)
        given[DEEP] = [
            (each[0], contained(each[1], each[0])) if isinstance(each[0], int) else contained(each, layer)
            for layer, each in layers
        ]
    return type(like)(**given)


def encodable(model: PreTrainedModel) -> tuple[str, ...]:
    """What a model reads besides text: "image", "audio", "video"."""
    names = forward_parameters(model)
    has_part = {kind: encoders(model) or hasattr(model.base_model, f"get_{kind}_features") for kind in KINDS}
    return tuple(
        kind
        for kind in KINDS
        if (has_part[kind] and placeholder_id(model.config, kind) is not None)
        or any(name.endswith(ARGUMENTS[kind]) for name in names)
    )
