"""The errors that inflight raises for its callers to read.

All but the last four are `ValueError`s: one sentence names the wrong value and what would be accepted. A fault inside a
running step is not raised; its requests end with `finish_reason="error"`.
"""


class InvalidRequestError(ValueError):
    """A prompt or a sampling parameter was refused; nothing was queued."""


class AdapterError(InvalidRequestError):
    """The adapter is unknown, or does not fit the model; the message says why."""


class QueueFullError(ValueError):
    """The waiting queue is full. Nothing was queued; the same request may be accepted later."""


class UnknownOptionError(ValueError, TypeError):
    """Unknown option. (Also a `TypeError`, as Python itself would raise.)"""


class ModelError(ValueError):
    """A model could not be loaded, or no executor runs it exactly; the message says why."""


class EngineDeadError(RuntimeError):
    """The engine died or was stopped before it could answer; the message says how. The next call starts it again."""


class EngineGivenUpError(EngineDeadError):
    """The engine has died too often in a row. It stays stopped until `stop()` is called."""


class RankLostError(RuntimeError):
    """A rank's process has ended; the message says which, and how. Its engine cannot run another step."""
