"""`ServerSettings`: an operator's settings of the HTTP server. Plain data, validated at construction."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from inflight.contracts.api import options
from inflight.contracts.api.params import MAX_LOGPROBS
from inflight.server.chat_format.families import CALL_FORMATS
from inflight.server.wire.addresses import Addresses

DEMO_MODEL_NAME = "inflight-demo"
"""The name of the embedded model."""

IN_MEMORY = ":memory:"
"""No file, for SQLite."""

ANY_NAME = "*"
"""An alias that matches every name."""


def names_of(model: str | None, served: Sequence[str] = ()) -> list[str]:
    """The served names: the model's name in answers, and its aliases, always including its own name."""
    own = [DEMO_MODEL_NAME] if model is None else [model]
    if model is not None and Path(model).expanduser().is_dir():
        own.insert(0, Path(model).expanduser().resolve().name)
    return sorted(dict.fromkeys([*served, *own]), key=lambda name: name == ANY_NAME)


@options.strict_options
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of requests and answers; `EngineConfig` has those of the engine.

    Attributes:
        model_name: the model's name in answers and in the list of models.
        model_aliases: other accepted names of the model; "*": any name.
        max_n: most sequences that a request may ask for per prompt.
        max_num_sequences: most sequences of one HTTP request: prompts times sequences per prompt.
        max_logprobs: most alternatives per token that a request may ask for.
        request_timeout: seconds after which a request is aborted; None: never.
        keep_alive_interval: seconds of silence after which a comment is sent on a stream, so that proxies keep the
            connection open.
        max_stall: seconds without a read by the client after which a stream's request is aborted.
        strict: whether fields that could be ignored or replaced are refused.
        trust_request_chat_template: whether requests may have a chat template, a program that runs in this process.
        batch_dir: a folder for files and batch jobs; None: disabled.
        max_file_size: the most bytes of an uploaded file.
        response_store: a file for stored responses and conversations.
        response_store_size: most bytes of them; the least recently used are dropped.
        allow_adapter_loading: whether clients may load and unload adapters.
        allowed_media_domains: hosts of images and sounds that requests give by http and https URLs.
        allowed_local_media_path: a folder of those that they give by file URLs; None: none are read.
        tool_call_parser: how the model writes tool calls, one of `CALL_FORMATS`; None: derived from its chat template.

    Raises:
        ValueError: an option is unknown, out of range, or does not go with another.
    """

    model_name: str = DEMO_MODEL_NAME
    model_aliases: tuple[str, ...] = ()
    max_n: options.Positive = 128
    max_num_sequences: options.Positive = 1024
    max_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] = 20
    request_timeout: options.Seconds | None = None
    keep_alive_interval: options.Seconds = 10.0
    max_stall: options.Seconds = 60.0
    strict: bool = False
    trust_request_chat_template: bool = False
    batch_dir: str | None = None
    max_file_size: options.Positive = 2**30
    response_store: str = IN_MEMORY
    response_store_size: options.Positive = 2**26
    allow_adapter_loading: bool = False
    allowed_media_domains: tuple[str, ...] = ()
    allowed_local_media_path: str | None = None
    tool_call_parser: str | None = None

    @property
    def addresses(self) -> Addresses:
        """What a new server may fetch."""
        return Addresses(self.allowed_media_domains, self.allowed_local_media_path)

    def __post_init__(self) -> None:
        for name in (self.model_name, *self.model_aliases):
            if not isinstance(name, str) or not name:
                raise ValueError(f"a name of the model is {name!r}; it must be a non-empty string")
        if self.tool_call_parser is not None:
            options.check("tool_call_parser", self.tool_call_parser, Literal[*CALL_FORMATS])
        _ = self.addresses  # refuses what is wrong
