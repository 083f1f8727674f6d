"""`OperatorSettings`: settings of the server's operations. Plain data, validated at construction."""

from dataclasses import dataclass

from inflight.contracts import options

KEYS_VARIABLE = "INFLIGHT_API_KEYS"
"""The environment variable for API keys, separated by commas."""

LOG_FORMATS = ("text", "json")
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
        traces_endpoint: an OpenTelemetry collector's URL for traces (OTLP over HTTP); None: no traces.
    """

    api_keys: tuple[str, ...] = ()
    api_key_file: str | None = None
    max_body_size: int = MAX_BODY_SIZE
    max_requests: int | None = None
    timeout_keep_alive: int = 120
    grace_period: float = 30.0
    log_format: str = "text"
    log_text: bool = False
    cors_origins: tuple[str, ...] = ()
    traces_endpoint: str | None = None
    ui: bool = True

    def __post_init__(self) -> None:
        options.check_integer("max_body_size", self.max_body_size, 1)
        options.check_integer("timeout_keep_alive", self.timeout_keep_alive, 1)
        if self.max_requests is not None:
            options.check_integer("max_requests", self.max_requests, 1)
        options.check_number(
            "grace_period", self.grace_period, "a number of seconds of at least 0", 0.0, options.MAX_FLOAT
        )
        options.check_choice("log_format", self.log_format, LOG_FORMATS)
        options.check_switch("log_text", self.log_text)
        options.check_switch("ui", self.ui)
        endpoint = self.traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"traces_endpoint is {endpoint!r}; it must be a URL, such as 'http://127.0.0.1:4318/v1/traces'"
            )
