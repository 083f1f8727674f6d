"""Whether and how an engine speculates."""

from collections.abc import Callable

from inflight.contracts.config import EngineConfig
from inflight.contracts.model_info import ModelInfo
from inflight.speculation import Constrained, Lookup, Speculation
from inflight.speculation.constrained import Grammars


def speculation_of(config: EngineConfig, grammars: Callable[[], Grammars | None]) -> Speculation:
    """What guesses, as the configuration asks for it.

    Args:
        grammars: gives the grammars of the engine's sequences, once there are any.
    """
    lookup = Lookup() if config.speculation in ("auto", "lookup") else None
    return Speculation(Constrained(grammars, lookup), config.max_guessed_tokens)


def describe_speculation(config: EngineConfig, info: ModelInfo) -> str:
    """What guesses, in words; or "off", and why although it is asked for."""
    if config.speculation == "off":
        return "off"
    if info.executor != "packed":
        return f"off: a model that runs as {info.executor} cannot take back what it has computed"
    if not info.is_batch_invariant:
        return "off: the model's logits depend on how many tokens run together, and so would its output"
    return "lookup and grammars" if config.speculation == "auto" else config.speculation
