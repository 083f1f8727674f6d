"""`OperatorSettings`: every choice about what surrounds the server. Plain data, checked when made."""

from dataclasses import dataclass

from inflight.contracts.options import (
    MAX_FLOAT,
    check_choice,
    check_integer,
    check_number,
    check_switch,
    strict_options,
)

LOG_FORMATS = ("text", "json")
MAX_BODY_SIZE = 32 * 2**20
"""By default: bytes. The longest of prompts, as token ids in JSON, has some megabytes."""


@strict_options
@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    """How the server is guarded, watched and ended; how requests are answered is `ServerSettings`'.

    Attributes:
        api_keys: one of which each request must have; with none here, in the file or in the environment, none must.
        api_key_file: a file with more of them, one a line.
        max_body_size: bytes that a request's body may have.
        max_requests: HTTP requests that are served at once; more are told to come back. None: any number.
        grace_period: seconds that running requests have to finish after SIGTERM.
        log_format: "text" for people or "json" for those who collect lines.
        log_text: whether prompts and answers are logged.
        cors_origins: web pages of these origins may call the server; "*" is all of them.
        traces_endpoint: an OpenTelemetry collector's URL for traces (OTLP over HTTP); None: no traces.
    """

    api_keys: tuple[str, ...] = ()
    api_key_file: str | None = None
    max_body_size: int = MAX_BODY_SIZE
    max_requests: int | None = None
    grace_period: float = 30.0
    log_format: str = "text"
    log_text: bool = False
    cors_origins: tuple[str, ...] = ()
    traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        check_integer("max_body_size", self.max_body_size, 1)
        if self.max_requests is not None:
            check_integer("max_requests", self.max_requests, 1)
        check_number("grace_period", self.grace_period, "a number of seconds of at least 0", 0.0, MAX_FLOAT)
        check_choice("log_format", self.log_format, LOG_FORMATS)
        check_switch("log_text", self.log_text)
        endpoint = self.traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"traces_endpoint is {endpoint!r}; it must be a URL, such as 'http://127.0.0.1:4318/v1/traces'"
            )
