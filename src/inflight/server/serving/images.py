"""Puts the images of a request into its prompt, where their marks are."""

from inflight.contracts.api.model_info import ModelInfo
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.strict_model import MARKED_IMAGE, READING
from inflight.text.tokenizer import Tokenizer

OMITTED = "\n[image omitted: it cannot be read here]\n"


def place_images(text: str, tokenizer: Tokenizer, info: ModelInfo, param: str) -> tuple[str, list[str]]:
    """Return a chat's text with the model's placeholders instead of marks, and the data URLs of these images, in order.

    A text-only model gets a text in place of an image, which a header names; so does a stored conversation, whose
    images are not kept.

    Args:
        param: the request field that holds the chat.

    Raises:
        ApiError: reading is strict, and there is an image that the model cannot read (400).
    """
    reading, images = READING.get(), list[str]()
    reads_images = "image" in info.input_modalities
    pieces = MARKED_IMAGE.split(text)
    for number in range(1, len(pieces), 2):
        if reads_images and pieces[number] in reading.images:
            images.append(reading.images[pieces[number]])
            pieces[number] = tokenizer.processor.placeholder
            continue
        if reading.is_strict:
            raise ApiError(400, f"{param} has an image; {info.model_class} takes text only here", param=param)
        reading.ignore("image")
        pieces[number] = OMITTED
    return "".join(pieces), images
