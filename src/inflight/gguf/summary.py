"""`GgufSummary`: a model's facts from a GGUF header."""

from dataclasses import dataclass
from typing import Any

from inflight.contracts.api.model_info import StoredWeights
from inflight.gguf.header import GgufHeader

BYTES_OF_KEY = 2
"""Keys and values in 16 bits."""


@dataclass(frozen=True, slots=True)
class GgufSummary:
    """Facts from a header.

    Attributes:
        context: the most tokens of a sequence; 0 if unknown.
        cache_bytes_per_token: of keys and values in 16 bits, in all layers, assuming no windows; 0 if unknown.
        tensors: by their types.
    """

    path: str
    name: str
    architecture: str
    num_parameters: int
    context: int
    cache_bytes_per_token: int
    has_chat_template: bool
    tensors: tuple[StoredWeights, ...]

    @classmethod
    def from_header(cls, header: GgufHeader) -> "GgufSummary":
        """Summarise a header."""
        kinds = sorted({each.kind for each in header.tensors.values()})
        sizes = {kind: [each.nbytes for each in header.tensors.values() if each.kind == kind] for kind in kinds}
        return cls(
            path=str(header.path),
            name=str(header.metadata.get("general.name", "")),
            architecture=header.architecture,
            num_parameters=header.num_parameters,
            context=_number(_own(header, "context_length")),
            cache_bytes_per_token=_cache_bytes(header),
            has_chat_template="tokenizer.chat_template" in header.metadata,
            tensors=tuple(
                sorted(
                    (StoredWeights(kind, len(each), sum(each)) for kind, each in sizes.items()),
                    key=lambda stored: -stored.num_bytes,
                )
            ),
        )


def _own(header: GgufHeader, key: str) -> Any:
    return header.metadata.get(f"{header.architecture}.{key}")


def _number(value: Any) -> int:
    return value if type(value) is int else 0


def _cache_bytes(header: GgufHeader) -> int:
    num_layers, num_heads = _number(_own(header, "block_count")), _number(_own(header, "attention.head_count"))
    size = _number(_own(header, "embedding_length")) // max(1, num_heads)
    key, value = (_number(_own(header, f"attention.{part}_length")) or size for part in ("key", "value"))
    kv_heads = _own(header, "attention.head_count_kv")
    in_all = (
        sum(map(_number, kv_heads)) if isinstance(kv_heads, list) else num_layers * (_number(kv_heads) or num_heads)
    )
    return in_all * (key + value) * BYTES_OF_KEY
