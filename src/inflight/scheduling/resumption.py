"""`Resumption`: ended sequences whose state a later request may continue, where blocks cannot be shared.

Where the model keeps recurrent states or a cache itself, they belong to one sequence and its slot. An ended sequence
therefore stays in its slot, with its blocks, until another one needs them; a request that begins with all of its
computed tokens goes on from there. So the next turn of a session, and a client that gave up and asks again, compute
only what is new. Owns no slot and no block.
"""

from collections import OrderedDict

from inflight.scheduling.sequence import Sequence


class Resumption:
    """The ended sequences, which still have their slots. The first has ended first."""

    def __init__(self) -> None:
        self._ended: OrderedDict[int, Sequence] = OrderedDict()

    def keep(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self._ended[sequence.sequence_id] = sequence

    def find(self, sequence: Sequence) -> Sequence | None:
        """The ended sequence of most tokens that another one, which has computed nothing, can continue. The last token
        is always computed."""
        if sequence.computes_prompt or sequence.num_computed_tokens:
            return None
        found = None
        for ended in self._ended.values():
            number = ended.num_computed_tokens
            if number >= len(sequence.token_ids) or ended.root != sequence.root:
                continue
            is_longest = found is None or number > found.num_computed_tokens
            if is_longest and ended.token_ids[:number] == sequence.token_ids[:number]:
                found = ended
        return found

    def take(self, ended: Sequence) -> Sequence:
        """Return an ended sequence, to be continued or released."""
        return self._ended.pop(ended.sequence_id)

    def take_first(self, but: Sequence | None = None) -> Sequence | None:
        """Return the first ended sequence, to be released, other than `but`; None: there is none."""
        first = next((each for each in self._ended.values() if each is not but), None)
        return None if first is None else self.take(first)
