"""`settled`: waits until the engine of an `LLM` has processed all messages."""

from inflight import LLM
from inflight.engine.engine import Engine


def settled(llm: LLM) -> Engine:
    """The engine. What is sent to it is obeyed in order, so once this is answered, every abort before it was obeyed."""
    llm.stats()
    return llm.engine
