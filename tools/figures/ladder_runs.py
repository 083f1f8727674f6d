"""The runs that one can play with in `docs/how-it-works.md`: the same requests through every rung, for each choice of
slots, lengths and arrivals.

`docs/assets/ladder-runs.js` has them as stretches of steps. Every step is one that ran here, on the embedded model.
"""

import json
import random
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

from inflight import __version__
from inflight.contracts.api.config import EngineConfig
from inflight.demo_model import DEMO_MODEL
from inflight.lessons.methods import Setting
from inflight.lessons.run import LessonRequest, Run

FILE = Path(__file__).resolve().parents[2] / "docs" / "assets" / "ladder-runs.js"
NUM_REQUESTS = 12
SLOTS = (2, 4, 8)
LENGTHS: Mapping[str, tuple[int, ...]] = {
    "all alike": (24,) * NUM_REQUESTS,
    "mixed": (48, 6, 18, 10, 30, 8, 14, 40, 6, 22, 12, 9),
    "one very long": (96, 10, 12, 8, 14, 9, 11, 13, 8, 10, 12, 9),
}
"""Tokens that each request generates."""

ARRIVALS: Mapping[str, int] = {"all at once": 0, "one after another": 5}
"""Steps between two requests."""

USES = ("prefill", "decode", "padding")


@dataclass(frozen=True, slots=True)
class Choice:
    """Which requests, and on how many slots."""

    slots: int
    lengths: str
    arrivals: str

    def requests(self) -> list[LessonRequest]:
        """Prompts of 3 to 16 random tokens, the same for all choices."""
        rng = random.Random(7)
        prompts = [[rng.randrange(10, 1000) for _ in range(rng.randint(3, 16))] for _ in range(NUM_REQUESTS)]
        gap = ARRIVALS[self.arrivals]
        return [
            LessonRequest(prompt, length, number * gap)
            for number, (prompt, length) in enumerate(zip(prompts, LENGTHS[self.lengths], strict=True))
        ]


def main() -> None:
    """Run all choices, and write the file."""
    choices = [Choice(*each) for each in product(SLOTS, LENGTHS, ARRIVALS)]
    config = EngineConfig(dtype="float32", enable_prefix_caching=False)
    settings = {slots: Setting(str(DEMO_MODEL), config.replace(max_num_seqs=slots)) for slots in SLOTS}
    runs = []
    for choice in choices:
        requests = choice.requests()
        methods = settings[choice.slots].methods
        accounts = {name: method(requests) for name, method in methods.items()}
        assert len({str(account.token_ids) for account in accounts.values()}) == 1, choice
        runs.append(
            {
                "slots": choice.slots,
                "lengths": choice.lengths,
                "arrivals": choice.arrivals,
                "requests": [[len(each.prompt_token_ids), each.max_new_tokens, each.arrival] for each in requests],
                "methods": {name: written(account) for name, account in accounts.items()},
            }
        )
    made = {"version": __version__, "commit": _commit(), "date": datetime.now(UTC).date().isoformat()}
    text = json.dumps({"made": made, "uses": USES, "runs": runs}, separators=(",", ":"))
    FILE.write_text(f"// Made by `make figures`.\nwindow.ladderRuns = {text};\n", encoding="utf-8")


def written(account: Run) -> dict[str, Any]:
    """A run as stretches `[slot, request, use, first step, last step]`, and for each step its tokens and how many of
    them were padding."""
    return {
        "stretches": list(_stretches(account)),
        "tokens": [sum(lane.num_tokens for lane in step.values()) for step in account.steps],
        "padding": [sum(lane.num_padding for lane in step.values()) for step in account.steps],
    }


def _stretches(account: Run) -> Iterator[list[int]]:
    open_: dict[int, list[int]] = {}
    for number, step in enumerate(account.steps):
        for slot, lane in step.items():
            what = [slot, lane.request, USES.index(lane.use)]
            if slot in open_ and open_[slot][:3] == what and open_[slot][4] == number - 1:
                open_[slot][4] = number
                continue
            if slot in open_:
                yield open_[slot]
            open_[slot] = [*what, number, number]
    yield from open_.values()


def _commit() -> str:
    """The tree from which it was made; empty outside of a clone."""
    command = ["git", "-C", str(FILE.parent), "describe", "--always", "--dirty", "--abbrev=9"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
