"""Formats a step profile as tables for a terminal. Decides only how it looks.

Draws a step profile: a bar for each part, and how short it could be. Needs the extra `pictures`.
"""

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Column, Table

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


NOTABLE_CORRECTION = 0.1


def profile_table(profile: StepProfile) -> RenderableType:
    """Return the measurement's settings, then a row for each part, then the whole step."""
    model, machine, work = profile.model, profile.machine, profile.work
    setting = Table(show_header=False, box=None, pad_edge=False)
    dtype = model.dtype if model.quantization is None else f"{model.dtype} and {model.quantization} weights"
    setting.add_row(
        "model", f"{model.model_class}, {dtype}, attention {model.attention_backend}, forward pass {model.forward_pass}"
    )
    setting.add_row(
        "step", f"{profile.num_sequences} sequences decode over {profile.num_cached_tokens:.0f} cached tokens each"
    )
    experts = f"{work.expert_bytes / 2**20:.1f} MiB of chosen experts, " if work.expert_bytes else ""
    setting.add_row(
        "its work",
        f"{work.weight_bytes / 2**20:.1f} MiB of weights, {experts}{work.cache_bytes / 2**20:.1f} MiB of cache, "
        f"{work.linear_operations / 1e9:.2f} GFLOP",
    )
    setting.add_row(
        "machine",
        f"reads {machine.read_bytes_per_second / 1e9:.1f} GB/s, computes {machine.operations_per_second / 1e9:.0f} "
        f"GFLOP/s with {profile.num_threads} thread{'s' if profile.num_threads > 1 else ''}",
    )
    if abs(profile.correction - 1) > NOTABLE_CORRECTION:
        setting.add_row("beware", f"parts were scaled by {profile.correction:.2f} to fit: was the machine busy?")
    if below := profile.below_floor:
        setting.add_row(
            "beware",
            f"{', '.join(below)} took less than the floor, which therefore is none: the weights fit the processor's "
            "caches, or the machine was busy while it was measured",
        )
    return Group(setting, "", _parts(profile))


def _parts(profile: StepProfile) -> Table:
    columns = (Column(heading, justify="right") for heading in ("time\nms", "share\n", "floor\nms", "times\nfloor"))
    table = Table("part\n", *columns, box=None, pad_edge=False, header_style="bold")
    for part in profile.parts:
        table.add_row(
            part.name,
            _milliseconds(part.seconds),
            f"{profile.share(part):.1%}",
            _milliseconds(part.floor_seconds),
            _times(part.times_floor),
        )
    table.add_section()
    table.add_row(
        "step, against weights and cache read once",
        _milliseconds(profile.step_seconds),
        "100.0%",
        _milliseconds(profile.floor_seconds),
        _times(profile.times_floor),
        style="bold",
    )
    return table


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3f}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{max(ratio, 1.0):.2f}"
