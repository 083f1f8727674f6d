"""Draws a step profile: a bar for each part, and how short it could be. Needs the extra `pictures`."""

from typing import TYPE_CHECKING

from inflight.observe.pictures import new_figure
from inflight.profiling.step_profile import StepProfile, times

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TIME, FLOOR = "#7fc79b", "#2f8f5b"


def profile_figure(profile: StepProfile) -> "Figure":
    """Return a figure with the whole step on top and its parts below. Raises `ValueError` without the extra."""
    bars = [("step", profile.step_seconds, profile.floor_seconds)]
    bars += [(part.name, part.seconds, part.floor_seconds or 0.0) for part in profile.parts]
    names, seconds, floors = zip(*bars, strict=True)
    figure = new_figure(9.0, 0.36 * len(bars) + 1.5)
    axes = figure.subplots()
    places = range(len(bars))
    axes.barh(places, [1e3 * value for value in seconds], color=TIME, label="time")
    axes.barh(places, [1e3 * value for value in floors], color=FLOOR, height=0.4, label="this machine's floor")
    for place, value, floor in zip(places, seconds, floors, strict=True):
        text = f" {1e3 * value:.2f} ms, {value / profile.step_seconds:.0%}"
        ratio = times(value, floor)
        text += "" if ratio is None else f", {ratio:.2f} x floor"
        axes.text(1e3 * max(value, floor), place, text, va="center", fontsize=8)
    axes.set_yticks(places, names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35e3 * max(*seconds, *floors))
    axes.set_xlabel("ms", fontsize=8)
    axes.tick_params(labelsize=8, length=2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        f"{profile.model.model_class}, {profile.model.dtype}: a decode step of {profile.num_sequences} sequences over "
        f"{profile.num_cached_tokens:.0f} cached tokens",
        loc="left",
        fontsize=9,
    )
    figure.legend(loc="outside lower center", ncols=2, fontsize=7, frameon=False)
    return figure
