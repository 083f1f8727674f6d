"""The race: runs the same requests through every method on the same weights, live, then shows a table and timelines."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from rich.console import Console, Group, RenderableType
from rich.live import Live

from inflight.lessons.methods import Method, warm_up
from inflight.lessons.run import LessonRequest, Options, Run
from inflight.lessons.scores import Scores, scores_table
from inflight.observe import pictures
from inflight.observe.timeline import Timeline, legend, timeline_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REFRESHES_PER_SECOND = 8


@dataclass(frozen=True, slots=True)
class Race:
    """The result of a race: each method's account, by name, in the order in which they ran."""

    runs: Mapping[str, Run]
    num_slots: int

    @property
    def scores(self) -> dict[str, Scores]:
        """Each method in numbers."""
        return {name: Scores.from_run(run, self.num_slots) for name, run in self.runs.items()}

    @property
    def timelines(self) -> list[Timeline]:
        """Each method's steps, on one scale."""
        scale = max(len(run.steps) for run in self.runs.values())
        return [Timeline(name, self.num_slots, run.steps, scale) for name, run in self.runs.items()]

    @property
    def differing(self) -> dict[str, int]:
        """For each method after the first, how many requests got different tokens than from the first."""
        first, *others = self.runs
        expected = self.runs[first].token_ids
        return {name: sum(a != b for a, b in zip(self.runs[name].token_ids, expected, strict=True)) for name in others}

    def __rich__(self) -> RenderableType:
        return Group(*self.timelines, legend(), "", scores_table(self.scores), "", self._comparison())

    def _comparison(self) -> str:
        if len(self.runs) == 1:
            return ""
        differing = {name: count for name, count in self.differing.items() if count}
        if not differing:
            return "All methods gave the same tokens."
        several = ", ".join(f"{count} requests with {name}" for name, count in differing.items())
        return f"Tokens differ from those of {next(iter(self.runs))} in: {several}."


def run_race(
    methods: Mapping[str, Method],
    requests: Sequence[LessonRequest],
    num_slots: int,
    console: Console,
    **options: Unpack[Options],
) -> Race:
    """Run `requests` through each of `methods`, one after the other, and show the growing timelines on `console`."""
    warm_up(methods, requests)
    runs: dict[str, Run] = {}
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for name, method in methods.items():
            watch = _show(live, name, num_slots, requests)
            if log := options.get("log"):
                log(f"=== {name} ===")
            own: Options = {**options, "watch": watch}
            runs[name] = method(requests, **own)
    return Race(runs, num_slots)


def _show(live: Live, name: str, num_slots: int, requests: Sequence[LessonRequest]) -> Callable[[Run], None]:
    """Return a function that redraws a run's timeline a few times per second."""
    most = sum(request.max_new_tokens for request in requests)
    shown_at = 0.0

    def watch(run: Run) -> None:
        nonlocal shown_at
        now = time.monotonic()
        if now - shown_at > 1 / REFRESHES_PER_SECOND:
            shown_at = now
            title = f"{name} ({run.num_generated} of at most {most} tokens)"
            live.update(Timeline(title, num_slots, run.steps), refresh=True)

    return watch


def mixed_requests(count: int, max_tokens: int, vocab_size: int, seed: int) -> list[LessonRequest]:
    """Return realistic requests: prompts of 4 to 40 random tokens; every fourth asks for `max_tokens`, the others for
    a twelfth to a third of that."""
    rng = random.Random(seed)
    requests = []
    for number in range(count):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(4, 40))]
        few = rng.randint(max(1, max_tokens // 12), max(1, max_tokens // 3))
        requests.append(LessonRequest(prompt, max_tokens if number % 4 == 0 else few))
    return requests


def write_png(race: Race, path: Path) -> None:
    """Write the timelines as a picture. Raises `ValueError` if matplotlib is missing or the file cannot be written."""
    pictures.save_png(_figure(race), path)


def write_html(race: Race, path: Path) -> None:
    """Write timelines and table as one self-contained page. Raises `ValueError` as `write_png` does."""
    bodies = [pictures.to_svg(_figure(race)), pictures.to_html(scores_table(race.scores), width=120)]
    pictures.write_html(path, "The same requests, four ways", bodies)


def _figure(race: Race) -> "Figure":
    subtitles = [f"{run.seconds:.2f} s" for run in race.runs.values()]
    return timeline_figure(race.timelines, subtitles)
