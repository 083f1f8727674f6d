"""The live page of a server with several models, as people use it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.demo_model import DEMO_MODEL
from tests.browser.conftest import Page, sync_api
from tests.server.models.serving import RunningModels

expect = sync_api.expect


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningModels]:
    folder = tmp_path_factory.mktemp("models")
    names = {name: str(shutil.copytree(DEMO_MODEL, Path(folder) / name)) for name in ("red", "green")}
    with RunningModels(names) as running:
        for name in names:
            running.complete(name)
        yield running


def test_a_model_is_chosen_and_asked(models: RunningModels, opened: Page) -> None:
    opened.open(f"{models.url}/#playground")
    page = opened.page
    choice = page.get_by_role("combobox", name="Model")
    expect(choice).to_have_value("green")  # it was used last
    expect(page).to_have_title("green · inflight")
    choice.select_option("red")
    page.wait_for_selector(".status.open")
    expect(page).to_have_title("red · inflight")
    expect(choice).to_have_value("red")
    page.get_by_label("completion").check()
    page.locator("input[name=max_tokens]").fill("5")
    with page.expect_response("**/v1/completions") as answered:
        page.get_by_role("button", name="Send", exact=True).click()
    assert answered.value.request.post_data_json["model"] == "red"
    expect(page.locator(".answer", has_text="ended (length)")).to_have_count(1)
