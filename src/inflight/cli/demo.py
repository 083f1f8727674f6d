"""`inflight demo`: streams a dozen prompts at once through the embedded model, with a live view of the slots; then runs
a short race against older batching methods."""

import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import click

from inflight.cli.demo_pictures import show_pictures
from inflight.cli.help import Command
from inflight.cli.options import quiet_libraries
from inflight.cli.serve import Address, serve, serve_model
from inflight.demo_model import DEMO_MODEL

PROMPTS = (
    ("Once upon a time", 90),
    ("In a quiet village", 60),
    ("One morning", 30),
    ("Long ago, there was a brave fox named Felix who lived under an old oak tree.", 80),
    ("Once upon a time, there was a shy dragon", 40),
    ("Once", 120),
    (
        "One cold day, while snow covered the roofs, a clever owl named Luna sat in a tall lighthouse. She had a "
        "silver key, and she loved it more than anything else.",
        60,
    ),
    ("This is the story of", 50),
    ("Many years ago, near a sleepy harbor, there lived", 100),
    ("Behind the old mill", 35),
    ("Mia was a", 70),
    ("On the first day of spring", 50),
)
"""Prompts, and how many tokens each may generate."""


@click.command(cls=Command)
@click.option("--slots", type=click.IntRange(min=1), default=5, help="Sequences that run at once.")
@click.option("--slow", is_flag=True, help="Pause a little after each step, to watch it.")
@click.option("--web", is_flag=True, help="Watch them in a browser: runs a server that gets the prompts repeatedly.")
@click.option("--pictures", is_flag=True, help="Watch a model for images caption a dozen drawings instead.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Of that server; 0: any free port.")
@click.option("--browser/--no-browser", default=True, help="Whether to open the page, or only print its address.")
def demo(slots: int, slow: bool, web: bool, pictures: bool, port: int, browser: bool) -> None:
    """Watch a dozen prompts run at once, live, then a short race.

    The prompts have different lengths and run through the embedded model. The race puts the same number of requests
    through static waves, padded and ragged batches, and the engine.
    """
    if pictures and (slow or web):
        raise click.UsageError("--pictures cannot be given with --slow or --web")
    if web:
        if slow:
            raise click.UsageError("--slow is for the terminal view; it cannot be given with --web")
        _serve(slots, port, browser)
        return
    if port or not browser:
        raise click.UsageError("--port and --no-browser are for --web")
    quiet_libraries()
    if pictures:
        show_pictures(slots)
        return
    from rich.console import Console
    from rich.live import Live
    from rich.markup import escape

    from inflight import LLM
    from inflight.contracts.api.params import SamplingParams
    from inflight.contracts.step.record import StepRecord
    from inflight.lessons.methods import Setting
    from inflight.lessons.race import mixed_requests, run_race
    from inflight.observe.live_view import SlotView
    from inflight.observe.run_report import RunLog

    console = Console()
    llm = LLM(max_num_seqs=slots)
    view, log = SlotView(slots, len(PROMPTS)), RunLog(slots, llm.model_info.num_blocks)

    def observe(record: StepRecord) -> None:
        view.observe(record)
        log.observe_step(len(record.spans), record.num_blocks_used, record.duration)
        if slow:
            time.sleep(0.01 * len(record.spans))

    llm.engine.observer = observe
    texts = [text for text, _ in PROMPTS]
    params = [SamplingParams(temperature=0.8, top_p=0.95, seed=i, max_tokens=m) for i, (_, m) in enumerate(PROMPTS)]
    num_tokens, start = 0, time.monotonic()
    outputs = {}
    with Live(view, console=console, refresh_per_second=20, transient=True):
        for delta in llm.stream(texts, params):
            num_tokens += len(delta.token_ids)
            view.add_text(str(delta.prompt_index), delta.text)  # a new engine numbers its requests from 0
            if delta.output is not None:
                outputs[delta.prompt_index] = delta.output
                view.count_finished()
    seconds = time.monotonic() - start
    for index, text in enumerate(texts):
        continuation = escape(outputs[index].outputs[0].text)
        console.print(f"[dim]{index:2}[/dim] [bold]{text}[/bold]{continuation}", highlight=False)
    info = llm.model_info
    console.print(
        f"\n{len(texts)} prompts, {num_tokens} tokens in {seconds:.2f} s on {info.device} in {info.dtype}: "
        f"[bold]{num_tokens / seconds:.0f} tokens/s[/bold], {log.num_steps} steps, "
        f"slots [bold]{log.occupancy:.0%}[/bold] occupied",
        highlight=False,
    )
    console.print(f"\nThe race: {len(texts)} requests of mixed lengths, {slots} slots, four ways (`inflight race`)\n")
    setting = Setting(str(DEMO_MODEL), replace(llm.config, dtype="float32"))
    requests = mixed_requests(len(texts), 100, info.vocab_size, seed=0)
    console.print(run_race(setting.methods, requests, slots, console))


SECONDS_BETWEEN_DOZENS = 2.0


def _serve(slots: int, port: int, opens_browser: bool) -> None:
    """Serve the embedded model, open its page, and send it the prompts until interrupted."""
    import webbrowser

    options = serve.make_context("serve", ["--port", str(port), "--max-num-seqs", str(slots)]).params

    def begin(address: str) -> None:
        click.echo(f"inflight: watch it at {address}; Ctrl-C ends it")
        threading.Thread(target=_send_prompts, args=(address,), daemon=True).start()
        if opens_browser and _has_screen():
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()

    hosts, port, path, names = (options.pop(name) for name in ("host", "port", "uds", "served_model_names"))
    serve_model(None, Address(hosts, port, path), names, options, when_ready=begin)


def _has_screen() -> bool:
    """Whether there is a display: without one, a text browser could take over the terminal."""
    return sys.platform != "linux" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _send_prompts(address: str) -> None:
    import urllib.request  # slower to import than all commands together

    def send(text: str, max_tokens: int) -> None:
        body = {"prompt": text, "max_tokens": max_tokens, "temperature": 0.8, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), headers)
        urllib.request.urlopen(request).close()

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        while all(future.exception() is None for future in [pool.submit(send, *prompt) for prompt in PROMPTS]):
            time.sleep(SECONDS_BETWEEN_DOZENS)
