"""The ladder to play with, in the documents."""

from pathlib import Path

from tests.browser.conftest import Page, sync_api

expect = sync_api.expect
ASSETS = Path(__file__).parents[2] / "docs" / "assets"


def test_the_ladder_can_be_gone_through(opened: Page, tmp_path: Path) -> None:
    scripts = "".join(f'<script src="{(ASSETS / name).as_uri()}"></script>' for name in ("ladder-runs.js", "ladder.js"))
    file = tmp_path / "page.html"
    file.write_text(f'<!doctype html><meta charset="utf-8"><div id="ladder">nothing</div>{scripts}', encoding="utf-8")
    page = opened.page
    page.goto(file.as_uri())
    expect(page.locator("#ladder canvas")).to_have_count(4)
    told = page.locator("section .ladder-told")
    steps = {}
    for _ in range(2):
        for name, text in zip(("static", "padded", "ragged", "engine"), told.all_inner_texts(), strict=True):
            steps[name] = int(text.rpartition("All: ")[2].split()[0])
        assert steps["static"] > steps["padded"] >= steps["ragged"] == steps["engine"]
        page.get_by_label("Arrivals", exact=True).press("ArrowRight")
    page.get_by_label("Lengths", exact=True).press("ArrowLeft")
    expect(page.locator("output").nth(1)).to_have_text("all alike")
    page.get_by_label("Slots", exact=True).press("ArrowLeft")
    expect(page.locator("output").first).to_have_text("2")
    page.get_by_label("One step on").click()
    before = told.first.inner_text()
    page.get_by_role("button", name="Play").click()
    expect(told.first).not_to_have_text(before)
    page.get_by_role("button", name="Pause").click()
