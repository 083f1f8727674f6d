"""The text of one sequence's output, up to its stop string.

Finds the token at which a stop string ends a sequence. EOS tokens, whose text is not shown, are simply not appended.
The same code runs beside the engine (to end sequences with stop strings at once) and in the caller's process (for the
text), so both find the same end.

`StopStrings`: finds where a text ends because of a stop string.

Decides which stop string counts, and how much text can be shown meanwhile. Knows nothing of tokens.

The stop string that ends first counts; of several that end there, the longest. This equals a check after each
character, so it takes effect at once and does not depend on how the text was divided. (vLLM checks after each token and
takes the first stop string of its list that is in the text so far: the same, except when a single token completes two.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from inflight.contracts.api.outputs import FinishReason
from inflight.contracts.api.params import SamplingParams
from inflight.contracts.api.structured_output import Reasoning
from inflight.text.detokenizer import IncrementalDetokenizer
from inflight.text.tokenizer import Tokenizer


class StopStrings:
    """Watches one text, fed in pieces, for stop strings; buffers less than the longest of them.

    It holds back the longest suffix of the text that is a prefix of a stop string, so a complete stop string ends
    there, too. Prefixes are looked up in the sorted list of stop strings. There is no setup cost, even for many long
    stop strings and many sequences. Each character is added once and dropped at most once, each with one lookup.
    """

    def __init__(self, stop: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        """Raise ValueError for an empty stop string, and for a bare string."""
        if isinstance(stop, str) or "" in stop:
            raise ValueError(f"stop strings must be a list of strings that are not empty, not {stop!r}")
        self._stop = tuple(sorted(set(stop)))
        self._first_characters = frozenset(each[0] for each in self._stop)
        self._include_stop_str_in_output = include_stop_str_in_output
        self._held_back = ""
        self._hit: str | None = None

    def feed(self, delta: str) -> tuple[str, str | None]:
        """Return the text that is safe to show after `delta`, and the stop string that has ended the text, if any.

        The text is cut before the stop string, or after it with `include_stop_str_in_output`. After the end, nothing
        more is returned.
        """
        if self._hit is not None:
            return "", self._hit
        if not self._held_back and self._first_characters.isdisjoint(delta):
            return delta, None
        text, begin = self._held_back + delta, 0
        for end in range(len(self._held_back) + 1, len(text) + 1):
            if text[begin:end].endswith(self._stop):
                self._hit = max(filter(text[begin:end].endswith, self._stop), key=len)
                self._held_back = ""
                return text[: end if self._include_stop_str_in_output else end - len(self._hit)], self._hit
            while begin < end and not self._is_beginning(text[begin:end]):
                begin += 1
        self._held_back = text[begin:]
        return text[:begin], None

    def flush(self) -> str:
        """Return the held-back text, for a text that ended without a stop string."""
        text, self._held_back = self._held_back, ""
        return text

    def _is_beginning(self, text: str) -> bool:
        """Whether a stop string begins with `text`."""
        index = bisect_left(self._stop, text)
        return index < len(self._stop) and self._stop[index].startswith(text)


class ReasoningText:
    """Watches one text; holds back less than a mark, and the white space before it."""

    def __init__(self, reasoning: Reasoning) -> None:
        self._reasoning = reasoning
        self._is_inside = not reasoning.begin
        self._is_answer = self._has_reasoning = False
        self._held = ""

    def feed(self, delta: str, *, is_last: bool = False) -> tuple[str, str]:
        """Return the reasoning, marks included, and the answer, as far as they are certain after `delta`."""
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


class OutputText:
    """Combines an incremental detokenizer and stop strings for one sequence.

    The output does not depend on how tokens are grouped into calls. Stop strings are searched only in the text of
    tokens after the first `min_tokens`, and after reasoning. Raises ValueError for an empty stop string.

    Attributes:
        stop_reason: the stop string that has ended the text, if any.
        num_tokens_until_stop: appended tokens that belong to the output: all, or those up to the end of the stop
            string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str] = (),
        *,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        reasoning: Reasoning | None = None,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens)
        self._stop_strings = StopStrings(stop, include_stop_str_in_output) if stop else None
        self._reasoning_text = ReasoningText(reasoning) if stop and reasoning is not None else None
        self._min_tokens = min_tokens
        self._pieces: list[str] = []
        self.num_tokens_until_stop = 0
        self.stop_reason: str | None = None

    @classmethod
    def of_request(cls, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> OutputText:
        """Return the text of a new sequence that answers a request with these parameters."""
        return cls(
            tokenizer,
            prompt_token_ids,
            params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
            reasoning=params.reasoning,
        )

    @property
    def text(self) -> str:
        """The text shown so far: all deltas joined."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def take_in(
        self, token_ids: Sequence[int], finish_reason: FinishReason | None, stop_reason: int | str | None = None
    ) -> str:
        """Return the text that is safe to show after a step's tokens; all of it if the sequence has ended.

        A token that ended the sequence (finish reason "stop" without a stop string) is not part of the text.
        """
        ended_by_token = finish_reason == "stop" and not isinstance(stop_reason, str)
        delta = self.append(token_ids[:-1] if ended_by_token else token_ids)
        return delta if finish_reason is None else delta + self.finish()

    def append(self, token_ids: Sequence[int]) -> str:
        """Return the text that is safe to show after `token_ids`; tokens after a stop are dropped."""
        if self._stop_strings is None:
            self.num_tokens_until_stop += len(token_ids)
            return self._show(self._detokenizer.append(token_ids))
        deltas = []
        for token_id in token_ids:
            if self.stop_reason is not None:
                break
            self.num_tokens_until_stop += 1
            deltas.append(self._watch(self._stop_strings, self._detokenizer.append([token_id])))
        return self._show("".join(deltas))

    def finish(self) -> str:
        """Return the held-back text, when the sequence has ended. It is also searched for stop strings."""
        if self.stop_reason is not None or self.num_tokens_until_stop == 0:
            return ""
        delta = self._detokenizer.finish()
        if self._stop_strings is not None:
            delta = self._watch(self._stop_strings, delta, is_last=True) + self._stop_strings.flush()
        return self._show(delta)

    def _watch(self, stop_strings: StopStrings, delta: str, *, is_last: bool = False) -> str:
        reasoning = ""
        if self._reasoning_text is not None:
            reasoning, delta = self._reasoning_text.feed(delta, is_last=is_last)
        if self.num_tokens_until_stop <= self._min_tokens:
            return reasoning + delta
        safe, self.stop_reason = stop_strings.feed(delta)
        return reasoning + safe

    def _show(self, delta: str) -> str:
        if delta:
            self._pieces.append(delta)
        return delta
