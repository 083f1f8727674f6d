"""The errors that inflight raises for its callers to read.

All but the last four are `ValueError`s: the caller gave something wrong, and one sentence says what, with its value,
and what would be accepted. A fault inside a running step is not raised but reported on its requests
(`finish_reason="error"`).
"""


class InvalidRequestError(ValueError):
    """A prompt or a sampling parameter was refused; nothing was queued."""


class AdapterError(InvalidRequestError):
    """There is no such adapter, or it cannot be used with the model; the message says why."""


class QueueFullError(ValueError):
    """Too many requests wait already. Nothing was queued; the same request may be accepted later."""


class UnknownOptionError(ValueError, TypeError):
    """There is no option of this name. (A `TypeError`, too, as Python itself would raise.)"""


class ModelError(ValueError):
    """A model could not be loaded, or no executor runs it exactly; the message says why."""


class EngineDeadError(RuntimeError):
    """The engine died or was stopped before it could answer; the message says how. The next call starts it again."""


class EngineGivenUpError(EngineDeadError):
    """The engine has died too often in a row. It is not started again before `stop()` has been called."""


class RankLostError(RuntimeError):
    """A process that runs a part of the model has ended; the message says which, and how. The engine that it belongs to
    is of no use any more."""
