"""`OperatorSettings`: settings of the server's operations. Plain data, validated at construction."""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from inflight.contracts.api import options

KEYS_VARIABLE = "INFLIGHT_API_KEYS"
"""The environment variable for API keys, separated by commas."""

LogFormat: TypeAlias = Literal["text", "json"]
MAX_BODY_SIZE = 32 * 2**20
"""The default limit in bytes. The longest prompts, as token ids in JSON, are a few megabytes."""


@options.strict_options
@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    """Protection, observation and shutdown of the server; `ServerSettings` has the settings of answers.

    Attributes:
        api_keys: each request needs one of these; without any here, in the file or in the environment, no key is
            needed.
        api_key_file: a file with more keys, one per line.
        max_body_size: most bytes of a request's body.
        max_requests: most HTTP requests served at once; further ones are told to retry. None: any number.
        timeout_keep_alive: seconds after which an idle connection is closed. Clients and proxies keep theirs for up to
            90 seconds, and a request on a connection that is being closed fails.
        grace_period: seconds that running requests have to finish after SIGTERM.
        log_format: "text" for people or "json" for log collectors.
        log_text: whether prompts and answers are logged.
        cors_origins: origins whose web pages may call the server; "*" means all.
        ui: whether `/` answers with the live page.
        root_path: the path under which a proxy serves it, whether or not the proxy strips it.
        traces_endpoint: an OpenTelemetry collector's URL for traces (OTLP over HTTP); None: no traces.

    Raises:
        ValueError: an option is unknown, out of range, or does not go with another.
    """

    api_keys: tuple[str, ...] = ()
    api_key_file: str | None = None
    max_body_size: options.Positive = MAX_BODY_SIZE
    max_requests: options.Positive | None = None
    timeout_keep_alive: options.Positive = 120
    grace_period: Annotated[
        float, Meta(ge=0, le=options.MAX_FLOAT, description="a number of seconds of at least 0")
    ] = 30.0
    log_format: LogFormat = "text"
    log_text: bool = False
    cors_origins: tuple[str, ...] = ()
    traces_endpoint: str | None = None
    ui: bool = True
    root_path: str = ""

    def __post_init__(self) -> None:
        path = self.root_path
        if path and (not path.startswith("/") or path.endswith("/")):
            raise ValueError(f"root_path is {path!r}; it must begin and not end with a slash, such as '/llm'")
        endpoint = self.traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"traces_endpoint is {endpoint!r}; it must be a URL, such as 'http://127.0.0.1:4318/v1/traces'"
            )
