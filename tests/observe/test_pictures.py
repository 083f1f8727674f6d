"""Pictures and pages are self-contained, and a failure to create one is one sentence."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from inflight.observe.pictures import new_figure, save_png, to_html, to_svg, write_html
from inflight.observe.step_drawing import StepDrawing, step_figure
from tests.observe.steps import captured


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_step_is_drawn_as_a_picture(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    view = captured(name=name)
    figure = step_figure(view)
    assert len(figure.axes) == len(view.masks)
    for axes, mask in zip(figure.axes, view.masks, strict=True):
        drawn = axes.images[0].get_array()
        assert drawn is not None
        vivid = np.asarray(drawn).min(axis=-1) < 0.75  # white and the pale cells of the same sequence are lighter
        assert np.array_equal(vivid, mask.allowed)
    save_png(figure, tmp_path / "step.png")
    width, height = png_size(tmp_path / "step.png")
    assert 500 < width < 4000
    assert 200 < height < 4000


def test_a_picture_of_a_large_step_has_a_reasonable_size(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    prompts = [list(range(1, 200)), list(range(1, 150)), *([n] for n in range(1, 20))]
    save_png(step_figure(captured(prompts, step=0, max_num_batched_tokens=400)), tmp_path / "step.png")
    assert max(png_size(tmp_path / "step.png")) < 4000


def test_any_text_can_be_a_label(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    pytest.importorskip("matplotlib")
    view = captured()
    span = replace(view.spans[0], keys=("$\\frac{", "字" * 40, "$x$", "\\x1b"))
    save_png(step_figure(replace(view, spans=(span, *view.spans[1:]))), tmp_path / "step.png")
    assert [str(each.message) for each in recwarn.list if issubclass(each.category, UserWarning)] == []


def test_a_page_is_self_contained(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    view = captured()
    write_html(tmp_path / "a.html", "one < two", [to_html(StepDrawing(view), 120), to_svg(step_figure(view))])
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert "<title>one &lt; two</title>" in page
    assert "<pre><span" in page
    assert "<svg width" in page
    assert not any(word in page for word in ("http:", "https:", "src=", "@import", "<script", "<link"))


def test_without_matplotlib_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install matplotlib"):
        new_figure(3, 2)


def test_a_file_that_cannot_be_written_is_reported_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere/a\.html' cannot be written: No such file"):
        write_html(tmp_path / "nowhere" / "a.html", "title", [])
