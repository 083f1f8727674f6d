"""Formats a step profile as tables for a terminal. Decides only how it looks."""

from rich.console import Group, RenderableType
from rich.table import Column, Table

from inflight.profiling.step_profile import StepProfile

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
