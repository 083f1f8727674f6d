"""Images in the playground."""

import base64
import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest

from inflight import AsyncLLM
from tests.browser.conftest import Page, sync_api
from tests.multimodal.models import image, with_processor
from tests.server.serving import RunningServer

expect = sync_api.expect

TRANSFER = """files => files.reduce((transfer, [name, type, data]) => {
    transfer.items.add(new File([Uint8Array.from(atob(data), each => each.charCodeAt(0))], name, { type }));
    return transfer;
}, new DataTransfer())"""
PASTE = """(box, transfer) => box.dispatchEvent(
    new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true, cancelable: true }))"""


@pytest.fixture(scope="module")
def seeing() -> Iterator[RunningServer]:
    model, processor = with_processor("llava")
    llm = AsyncLLM(copy.deepcopy(model), processor, in_process=True, num_blocks=400)
    with RunningServer(llm) as running:
        assert running.http.get("/v1/models").status_code == 200
        yield running


def png(number: int) -> bytes:
    file = io.BytesIO()
    image(number).save(file, "PNG")
    return file.getvalue()


def playground(server: RunningServer, opened: Page) -> "sync_api.Page":
    opened.open(f"{server.url}/#playground")
    opened.page.get_by_label("chat").check()
    return opened.page


def transfer(page: "sync_api.Page", *files: tuple[str, str, bytes]) -> "sync_api.JSHandle":
    """What is dropped or pasted: names, types and contents of files."""
    return page.evaluate_handle(TRANSFER, [(name, kind, base64.b64encode(data).decode()) for name, kind, data in files])


def test_images_are_dropped_pasted_or_chosen_and_the_model_reads_them(seeing: RunningServer, opened: Page) -> None:
    page = playground(seeing, opened)
    page.locator("input[name=max_tokens]").fill("6")
    page.locator("input[name=temperature]").fill("0")
    box = page.locator("textarea.prompt")
    dropped = transfer(page, ("a page.png", "image/png", png(0)), ("<b>.png", "image/png", png(1)))
    assert not box.evaluate(
        "(box, dataTransfer) => box.dispatchEvent(new DragEvent('dragover', "
        "{ dataTransfer, bubbles: true, cancelable: true }))",
        dropped,
    ), "the page takes it"
    box.dispatch_event("drop", {"dataTransfer": dropped})
    attached = page.locator(".images span")
    expect(attached).to_have_count(2)
    box.evaluate(PASTE, transfer(page, ("image.png", "image/png", png(2))))
    expect(attached).to_have_count(3)
    chooser = page.get_by_label("Images", exact=True)
    chooser.evaluate("input => input.onclick = event => { event.preventDefault(); input.dataset.clicked = true; }")
    button = page.get_by_role("button", name="Attach images")
    button.focus()
    page.keyboard.press("Enter")
    expect(chooser).to_have_attribute("data-clicked", "true")
    chooser.set_input_files({"name": "last.png", "mimeType": "image/png", "buffer": png(3)})
    expect(attached).to_have_count(4)
    expect(page.get_by_alt_text("<b>.png")).to_be_visible()
    kept = page.get_by_role("button", name="Remove image.png").element_handle()
    page.get_by_role("button", name="Remove <b>.png").focus()
    page.keyboard.press("Enter")
    expect(attached).to_have_count(3)
    assert kept.get_attribute("aria-label") == "Remove image.png", "a button stays with its image"
    kept.click()
    expect(attached).to_have_count(2)
    box.fill("What are they?")
    page.get_by_role("button", name="as Python").click()
    compile(page.locator("pre.code").inner_text(), "written", "exec")
    box.press("Control+Enter")
    expect(page.locator(".answer", has_text="ended (length)")).to_have_count(1)
    urls = [f"data:image/png;base64,{base64.b64encode(png(number)).decode()}" for number in (0, 3)]
    shown = page.locator(".message.user img")
    assert shown.evaluate_all("all => all.map(each => each.src)") == urls
    assert shown.evaluate_all("all => all.every(each => each.complete && each.naturalWidth > 0)")
    expect(page.locator(".message.user .text")).to_have_text("What are they?")
    expect(attached).to_have_count(0)
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": each}} for each in urls]
    content.append({"type": "text", "text": "What are they?"})
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0}
    (choice,) = seeing.http.post("/v1/chat/completions", json=body).json()["choices"]
    assert page.locator(".answer .text").inner_text() == choice["message"]["content"]


def test_what_is_no_image_is_not_attached(seeing: RunningServer, opened: Page) -> None:
    page = playground(seeing, opened)
    page.locator("textarea.prompt").dispatch_event(
        "drop", {"dataTransfer": transfer(page, ("a.txt", "text/plain", b"a"))}
    )
    expect(page.get_by_role("alert")).to_have_text("a.txt is not an image")
    expect(page.locator(".images")).to_have_count(0)


def test_a_text_beside_an_image_is_pasted_as_a_text(seeing: RunningServer, opened: Page) -> None:
    page = playground(seeing, opened)
    both = transfer(page, ("image.png", "image/png", png(0)))
    both.evaluate("transfer => transfer.setData('text/plain', 'a cell')")
    assert page.locator("textarea.prompt").evaluate(PASTE, both), "the box takes it"
    expect(page.locator(".images")).to_have_count(0)


def test_a_model_of_texts_gets_no_images(server: RunningServer, opened: Page) -> None:
    page = playground(server, opened)
    expect(page.get_by_role("button", name="Send this")).to_be_visible()
    expect(page.get_by_role("button", name="Attach images")).to_have_count(0)
