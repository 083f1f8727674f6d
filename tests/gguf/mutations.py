"""Changes GGUF files at random. The reader may refuse them only with a `ModelError`.

python -m tests.gguf.mutations --number 100_000
"""

import argparse
import random
import struct
import tempfile
from pathlib import Path

from inflight.contracts.api.errors import ModelError
from inflight.gguf.header import GgufHeader
from inflight.gguf.summary import GgufSummary
from tests.gguf.files import tiny, write

NUMBERS = (0, 1, 2, 4, 8, 9, 10, 13, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)


def check_mutations(whole: bytes, folder: Path, rng: random.Random, number: int) -> int:
    """Read this number of changed files. Returns the number of refusals."""
    path, refused = folder / "mutated.gguf", 0
    end_of_header = GgufHeader.read(_written(path, whole)).tensors
    length = min(each.start for each in end_of_header.values())
    for _ in range(number):
        _written(path, _mutated(whole, length, rng))
        try:
            header = GgufHeader.read(path)
        except ModelError:
            refused += 1
            continue
        GgufSummary.from_header(header)
        size = path.stat().st_size
        assert all(0 < each.start <= each.start + each.nbytes <= size for each in header.tensors.values())
    return refused


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _mutated(whole: bytes, length: int, rng: random.Random) -> bytes:
    """Changes, removes, duplicates or truncates some of the first `length` bytes."""
    content = bytearray(whole)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        if not content:
            break
        at = rng.randrange(min(length, len(content)))
        match rng.randrange(6):
            case 0:
                content[at] = rng.randrange(256)
            case 1:
                content[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))
            case 2:
                content[at : at + 4] = struct.pack("<I", rng.choice(NUMBERS) % 2**32)
            case 3:
                del content[at : at + rng.choice((1, 4, 8, 100))]
            case 4:
                content[at:at] = content[at : at + rng.choice((1, 8, 50))]
            case _:
                if rng.random() < 0.2:
                    del content[at:]
                    length = max(1, at)
    return bytes(content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    options = parser.parse_args()
    print(f"seed {options.seed}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.gguf")
        write(path, tiny("llama", num_hidden_layers=1, vocab_size=32, intermediate_size=256), lambda name: "Q4_K")
        refused = check_mutations(path.read_bytes(), Path(folder), random.Random(options.seed), options.number)
    print(f"{refused} of {options.number} files were refused")


if __name__ == "__main__":
    main()
