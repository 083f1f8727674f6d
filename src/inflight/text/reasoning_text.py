"""`ReasoningText`: divides a text, fed in pieces, into leading reasoning and the answer, in which stop strings count.
White space after reasoning is not part of the answer.
"""

from inflight.contracts.structured_output import Reasoning


class ReasoningText:
    """Watches one text; holds back less than a marker, and the white space before it."""

    def __init__(self, reasoning: Reasoning) -> None:
        self._reasoning = reasoning
        self._is_inside = not reasoning.begin
        self._is_answer = self._has_reasoning = False
        self._held = ""

    def feed(self, delta: str, *, is_last: bool = False) -> tuple[str, str]:
        """Return the reasoning, markers included, and the answer, as far as certain after `delta`."""
        begin, end, held, reasoning = self._reasoning.begin, self._reasoning.end, self._held + delta, ""
        while not self._is_answer:
            if self._is_inside:
                place = held.find(end)
                length = place + len(end) if place >= 0 else len(held) if is_last else max(0, len(held) - len(end) + 1)
                reasoning, held = reasoning + held[:length], held[length:]
                if place < 0:
                    break
                self._is_inside, self._has_reasoning = False, True
            text = held.lstrip()
            space = len(held) - len(text)
            if begin and text.startswith(begin):
                self._is_inside = True
                reasoning, held = reasoning + held[: space + len(begin)], text[len(begin) :]
            elif begin.startswith(text) and not is_last:
                break
            else:
                self._is_answer = True
                if self._has_reasoning:
                    reasoning, held = reasoning + held[:space], text
        answer, self._held = (held, "") if self._is_answer else ("", held)
        return reasoning, answer
