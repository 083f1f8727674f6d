"""The live page as people use it."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from inflight import AsyncLLM
from inflight.server.live import history
from tests.browser.conftest import Page, sync_api
from tests.server.serving import RunningServer

expect = sync_api.expect

HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    "<b>bold</b>&lt;i&gt; 'q' \"q\""
)


@contextmanager
def requests(server: RunningServer, number: int, **body: Any) -> Iterator[None]:
    """Runs this number of requests until the block ends."""
    asked = {"prompt": [5, 6, 7] * 20, "max_tokens": 900, "ignore_eos": True, "stream": True} | body
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            with server.http.stream("POST", "/v1/completions", json=asked) as response:
                for _ in response.iter_lines():
                    if is_over.is_set():
                        break

    threads = [threading.Thread(target=run) for _ in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join(60)


def pixels_of(page: Page, selector: str) -> str:
    """What a canvas shows."""
    shown: str = page.page.locator(selector).evaluate("canvas => canvas.toDataURL()")
    return shown


def playground(server: RunningServer, opened: Page, kind: str) -> "sync_api.Page":
    """The playground, for chats or completions."""
    opened.open(f"{server.url}/#playground")
    opened.page.get_by_label(kind).check()
    return opened.page


def test_lanes_move_while_requests_run_and_stand_still_when_paused(server: RunningServer, opened: Page) -> None:
    opened.open(server.url)
    page = opened.page
    expect(page.locator("button.lane")).to_have_count(4)
    with requests(server, 6):
        expect(page.locator("button.lane:enabled")).to_have_count(4)
        expect(page.locator(".queue li")).not_to_have_count(0)
        lane = "button.lane >> nth=0 >> canvas"
        before = pixels_of(opened, lane)
        page.wait_for_function(
            "before => document.querySelector('button.lane canvas').toDataURL() !== before", arg=before
        )
        page.get_by_role("button", name="Pause").click()
        words = page.locator("button.lane .words").first
        shown, before = words.inner_text(), pixels_of(opened, lane)
        with server.http.stream("GET", "/live/events") as events:  # meanwhile others are told of more
            told = (line for line in events.iter_lines() if line.startswith("data: "))
            for _ in range(4):
                next(told)
        assert (words.inner_text(), pixels_of(opened, lane)) == (shown, before)
        page.get_by_role("button", name="Go on").click()
        page.wait_for_function("shown => document.querySelector('button.lane .words').textContent !== shown", arg=shown)
    expect(page.locator("button.lane:enabled")).to_have_count(0)


def test_a_lane_tells_of_its_request_without_its_text(server: RunningServer, opened: Page) -> None:
    opened.open(server.url)
    page = opened.page
    with requests(server, 1, prompt="Once upon a time", n=64):  # it runs for a minute
        page.locator("button.lane:enabled").first.click()
        panel = page.locator("section.request")
        expect(panel).to_contain_text("of 900 tokens")
        expect(panel).to_contain_text("Its text is not shown")
        expect(panel).not_to_contain_text("Once upon")
        page.keyboard.press("Escape")
        expect(panel).to_have_count(0)


def test_steps_are_drawn_and_can_be_gone_through(server: RunningServer, opened: Page) -> None:
    opened.open(server.url)
    page = opened.page
    page.get_by_role("tab", name="Step").click()
    with requests(server, 3):
        expect(page.locator("tbody tr")).to_have_count(3)
        page.get_by_role("button", name="before").click()
        heading = page.locator("h3").first
        shown = heading.inner_text()
        expect(page.get_by_role("img", name="The packed row")).to_be_visible()
        expect(page.get_by_role("img", name="The mask")).to_be_visible()
        page.get_by_role("button", name="before").click()
        expect(heading).not_to_have_text(shown)
        page.get_by_role("button", name="follow the last").click()


def test_the_playground_waits_until_it_knows_whether_the_model_can_chat(server: RunningServer, opened: Page) -> None:
    """Otherwise a completion would become a chat while somebody writes it."""
    held: list[sync_api.Route] = []
    opened.page.route("**/live/about", lambda route: held.append(route))
    opened.open(f"{server.url}/#playground")
    while not held:
        opened.page.wait_for_timeout(10)
    expect(opened.page.get_by_text("asking the server")).to_be_visible()
    expect(opened.page.get_by_label("completion")).to_have_count(0)
    held[0].continue_()
    expect(opened.page.get_by_label("chat")).to_be_checked()


def test_prompts_are_answered_side_by_side_with_log_probabilities(server: RunningServer, opened: Page) -> None:
    page = playground(server, opened, "completion")
    page.locator("input[name=max_tokens]").fill("12")
    page.locator("input[name=temperature]").fill("0")
    page.locator("input[name=logprobs]").check()
    for _ in range(2):
        page.get_by_role("button", name="Add a prompt beside").click()
    page.get_by_role("button", name="Send all 3").click()
    expect(page.locator(".answer", has_text="ended (length)")).to_have_count(3)
    shown = page.locator(".column").first.locator(".answer .text").inner_text()
    plain = server.complete(prompt="Once upon a time", max_tokens=12, temperature=0)
    assert shown.strip() == plain["choices"][0]["text"].strip()
    token = page.locator(".scored").first
    assert "%" in (token.get_attribute("title") or "")
    page.get_by_role("button", name="as Python").click()
    written = page.locator("pre.code").inner_text()
    compile(written, "written", "exec")
    assert '"temperature": 0' not in written
    assert "temperature=0" in written
    page.get_by_role("button", name="as curl").click()
    expect(page.locator("pre.code")).to_contain_text("/v1/completions")
    page.locator("input[name=stop_token_ids]").fill("2, 5")
    page.locator("input[name=logit_bias]").fill('{"42": -5}')
    page.locator("textarea[name=bad_words]").fill("fox\nowl")
    page.get_by_role("button", name="as curl").click()
    for text in ('"stop_token_ids": [\n  2,\n  5\n ]', '"42": -5', '"owl"'):
        expect(page.locator("pre.code")).to_contain_text(text)


def test_a_chat_goes_on_and_an_output_can_have_a_form(server: RunningServer, opened: Page) -> None:
    page = playground(server, opened, "chat")
    page.locator("input[name=max_tokens]").fill("40")
    page.get_by_text("Form of the output").click()
    page.locator("select[name=form]").select_option("choice")
    for number, turn in enumerate(("Is it raining?", "Are you sure?")):
        page.locator("textarea.prompt").fill(turn)
        page.locator("textarea.prompt").press("Control+Enter")
        expect(page.locator(".message")).to_have_count(2 * number + 1)  # the last answer is beside them
        expect(page.locator(".answer", has_text="ended (stop)")).to_have_count(1)
        expect(page.locator(".answer .text")).to_have_text(re.compile("^(yes|no|perhaps)$"))
    page.locator("select[name=form]").select_option("json")
    page.locator("textarea[name=pattern]").fill("{not json")
    page.get_by_role("button", name="Send this").click()
    expect(page.get_by_role("alert")).to_contain_text("the JSON schema is not JSON")


def test_tools_are_answered_by_hand(server: RunningServer, opened: Page) -> None:
    page = playground(server, opened, "chat")
    page.locator("input[name=max_tokens]").fill("60")
    page.get_by_text("Tools", exact=True).click()
    page.get_by_role("button", name="an example").click()
    page.locator("select[name=tool_choice]").select_option("required")
    tools = json.loads(page.locator("textarea[name=tools]").input_value())
    tools[0]["function"]["parameters"]["properties"]["city"]["enum"] = ["Rome"]
    page.locator("textarea[name=tools]").fill(json.dumps(tools))
    page.locator("textarea.prompt").fill("How is the weather?")
    page.get_by_role("button", name="Send this").click()
    expect(page.get_by_label("its result")).to_be_visible()
    assert re.sub(r"\s", "", page.locator(".call code").inner_text()) == 'weather({"city":"Rome"})'
    page.locator("select[name=tool_choice]").select_option("none")
    page.get_by_label("its result").fill("sunny")
    page.get_by_role("button", name="answer").click()
    expect(page.locator(".message.tool")).to_contain_text("sunny")
    expect(page.locator(".answer", has_text="ended")).to_have_count(1)


def test_hostile_texts_stay_text(server: RunningServer, opened: Page) -> None:
    page = playground(server, opened, "completion")
    page.get_by_text("Form of the output").click()
    page.locator("select[name=form]").select_option("choice")
    page.locator("textarea[name=pattern]").fill(HOSTILE)
    page.locator("textarea.prompt").fill(HOSTILE)
    page.locator("input[name=max_tokens]").fill("400")
    page.get_by_role("button", name="Send", exact=True).click()
    expect(page.locator(".answer", has_text="ended (stop)")).to_have_count(1)
    assert page.locator(".answer .text").inner_text() == HOSTILE
    page.get_by_role("button", name="as curl").click()
    assert not page.evaluate("document.querySelectorAll('main img, main script, main b').length")
    assert "owned" not in page.title()


def test_a_request_of_this_page_is_shown_with_its_text(server: RunningServer, opened: Page) -> None:
    page = playground(server, opened, "completion")
    for name, value in {"max_tokens": "900", "min_tokens": "900", "n": "64"}.items():  # it runs for a minute
        page.locator(f"input[name={name}]").fill(value)
    page.locator("textarea.prompt").fill("One morning")
    page.get_by_role("button", name="Send", exact=True).click()
    expect(page.locator(".answer").first).to_contain_text("first token")
    page.get_by_role("tab", name="Now").click()
    page.locator("button.lane:enabled").first.click()
    expect(page.locator("section.request pre")).to_contain_text("One morning")
    page.get_by_role("tab", name="Playground").click()
    page.get_by_role("button", name="Stop").click()


def test_the_hour_is_drawn_and_other_settings_are_tried(
    server: RunningServer, opened: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "NICENESS", 0)  # other tests keep the cores busy
    opened.open(server.url)
    page = opened.page
    for number in range(3):
        server.complete(prompt=[7] * (20 + 30 * number), max_tokens=20, ignore_eos=True)
    page.get_by_role("tab", name="Load").click()
    expect(page.locator(".chart canvas")).to_have_count(4)
    expect(page.locator("main")).to_contain_text("requests came")
    page.get_by_role("tab", name="Simulate").click()
    page.locator("input[name=max_num_seqs]").fill("1")
    button = page.get_by_role("button", name="Simulate")
    for _ in range(30):  # what was recorded is written once a second
        button.click()
        expect(button).to_be_enabled()
        if page.locator("tbody tr").count():
            break
    expect(page.locator("tbody tr", has_text="generated tokens/s")).to_be_visible()
    page.get_by_role("tab", name="API").click()
    expect(page.locator("summary", has_text="/v1/chat/completions")).to_be_visible()


def test_tabs_can_be_gone_through_by_keys(server: RunningServer, opened: Page) -> None:
    opened.open(server.url)
    page = opened.page
    page.locator("#tab-now").focus()
    for name in ("step", "playground", "load"):
        page.keyboard.press("ArrowRight")
        expect(page.locator(f"#tab-{name}")).to_have_attribute("aria-selected", "true")
        expect(page.locator(f"#tab-{name}")).to_be_focused()
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, input, select, textarea')].filter("
        "each => !(each.textContent.trim() || each.getAttribute('aria-label') || each.labels?.length)).length"
    )
    assert unnamed == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_without_scrolling_sideways(server: RunningServer, browser: Any, scheme: Any) -> None:
    context = browser.new_context(viewport={"width": 380, "height": 800}, color_scheme=scheme)
    opened = Page(context.new_page())
    opened.open(server.url)
    for name in ("now", "step", "playground", "load", "simulate", "api"):
        opened.page.evaluate(f"location.hash = '{name}'")
        expect(opened.page.locator(f"#tab-{name}")).to_have_attribute("aria-selected", "true")
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 380, name
    context.close()


def test_a_page_finds_a_server_that_was_away(opened: Page) -> None:
    with RunningServer(AsyncLLM()) as first:
        opened.open(first.url)
        port = first.port
    expect(opened.page.locator(".status.waiting")).to_be_visible()
    with RunningServer(AsyncLLM(), port=port) as second:
        expect(opened.page.locator(".status.open")).to_be_visible()
        with requests(second, 1):
            expect(opened.page.locator("button.lane:enabled")).to_have_count(1)
    opened.complaints.clear()  # of connections that were refused meanwhile
