"""Puts the images and sounds of a request into its prompt, where their marks are."""

from typing import Any

from inflight.contracts.api.errors import InvalidRequestError
from inflight.contracts.api.model_info import ModelInfo
from inflight.contracts.step.multimodal import KINDS
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.strict_model import MARKED_ITEM, READING
from inflight.text.tokenizer import Tokenizer

OMITTED = "\n[{} omitted: it cannot be read here]\n"


def place_items(text: str, tokenizer: Tokenizer, info: ModelInfo, param: str) -> tuple[str, dict[str, list[Any]]]:
    """Return a chat's text with the model's placeholders instead of marks, and what these stand for, by kind, in order.

    A model that does not read an item gets a text in its place, which a header names; so does a stored conversation,
    whose images and sounds are not kept.

    Args:
        param: the request field that holds the chat.

    Raises:
        ApiError: reading is strict, and there is an item that the model cannot read (400).
        InvalidRequestError: an item could not be fetched.
    """
    reading, items = READING.get(), {kind: list[Any]() for kind in KINDS}
    pieces = MARKED_ITEM.split(text)
    for number in range(1, len(pieces), 2):
        kind, item = reading.items.get(pieces[number], ("image", None))
        if item is not None and kind in info.input_modalities:
            if isinstance(item, InvalidRequestError):
                raise item
            items[kind].append(item)
            pieces[number] = tokenizer.processor.of(kind).placeholder
            continue
        if reading.is_strict:
            reads = " and ".join(["text", *(KINDS[each] for each in KINDS if each in info.input_modalities)])
            raise ApiError(400, f"{param} has {KINDS[kind]}; {info.model_class} takes {reads} only here", param=param)
        reading.ignore(kind)
        pieces[number] = OMITTED.format(kind)
    return "".join(pieces), items
