"""Mutated image files are read or refused in one sentence: `python -m tests.multimodal.fuzz_images [number]`."""

import io
import random
import resource
import sys
import warnings
from collections import Counter

from inflight.contracts.api.errors import InvalidRequestError
from inflight.text.media import open_image
from tests.multimodal.models import image

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "ICO", "TGA", "JPEG2000")


def files() -> list[bytes]:
    """A file of each format."""
    written = []
    for number, name in enumerate(FORMATS):
        file = io.BytesIO()
        image(number).save(file, name)
        written.append(file.getvalue())
    return written


def mutated(draw: random.Random, content: bytes) -> bytes:
    """The file with some bytes changed, cut, doubled or moved; mostly near its beginning, where its sizes are."""
    data = bytearray(content)
    for _ in range(draw.randrange(1, 8)):
        place = min(int(draw.expovariate(1 / 40)), len(data) - 1) if draw.random() < 0.7 else draw.randrange(len(data))
        match draw.randrange(4):
            case 0:
                data[place] = draw.randrange(256)
            case 1:
                data[place : place + 4] = draw.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff"))
            case 2:
                del data[place : place + draw.randrange(1, 30)]
            case _:
                data[place:place] = data[: draw.randrange(1, 60)]
        if not data:
            break
    return bytes(data)


def what_is_said(content: bytes) -> str:
    """The refusal of a file; "": it is read."""
    try:
        assert open_image(content).mode == "RGB"
    except InvalidRequestError as error:
        return str(error)
    return ""


def main() -> None:
    """Run."""
    number, draw, sources = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000, random.Random(0), files()
    ends: Counter[str] = Counter()
    warnings.simplefilter("ignore")
    for index in range(number):
        message = what_is_said(mutated(draw, sources[index % len(sources)]))
        assert "\n" not in message, message
        assert len(message) < 400, message
        ends["refused" if message else "read"] += 1
    print(dict(ends), f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB at most")


if __name__ == "__main__":
    main()
