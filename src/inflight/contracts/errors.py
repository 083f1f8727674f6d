"""The errors that inflight raises for its callers to read.

All but the last are `ValueError`s: something that the caller gave was wrong, and the sentence says what, with which
value, and what would be accepted. A fault inside a running step is not raised but reported on its requests
(`finish_reason="error"`).
"""


class InvalidRequestError(ValueError):
    """A prompt or a sampling parameter was refused at the door; nothing was queued."""


class QueueFullError(ValueError):
    """Too many requests wait already; nothing was queued, and the same request may be accepted later."""


class UnknownOptionError(ValueError, TypeError):
    """An option that does not exist was given by name (a `TypeError` too, as Python's own refusal would be)."""


class ModelError(ValueError):
    """A model could not be loaded, or cannot be run exactly by any executor; the message says why."""


class EngineDeadError(RuntimeError):
    """The engine died, or was stopped, before it could answer; the message says how. The next call starts it anew."""
