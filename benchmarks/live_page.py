"""What an open live page costs: tokens a second that clients get, without a page, with a reader, and with a browser.

python -m benchmarks.live_page --model qwen3-0.6b --dtype bfloat16 --seconds 6
python -m benchmarks.live_page                                            # the embedded model: the shortest steps

One server (`inflight serve`) gets the same requests over HTTP again and again, as many at once as it has slots, and
what arrives is counted from the moment on at which all of them decode. In turn no client watches, a reader of
`/live/events`, or a headless Chromium with the page. Reader, browser, clients and engine share the cores, so what a
browser does is in its figure. Two other servers take their turns, too: one without a page (`--no-ui`), and one like the
first, because two processes that do the same are not equally fast. The turns are short and many, and each is compared
with the one of the same round in which the first is unwatched: what else a shared machine does meanwhile is mostly in
both. Weights are random but for the embedded model's.
"""

import argparse
import asyncio
import math
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import aiohttp

from benchmarks.compare import describe_machine
from benchmarks.peers.models import model_folder

NUM_TOKENS = 900
"""More than a turn has time for."""

SECONDS_TO_OPEN = 2.0


@contextmanager
def served(options: argparse.Namespace, *more: str) -> Iterator[str]:
    """A server; its address."""
    command = [sys.executable, "-m", "inflight", "serve", "--port", "0", "--max-num-seqs", str(options.slots)]
    command += ["--speculation", "off", "--no-prefix-caching", *more]
    if options.model is not None:
        command += ["-m", str(model_folder(options.model)), "--load-format", "dummy", "--dtype", options.dtype]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        match = next(filter(None, (re.search(r"served at (\S+)", line) for line in server.stdout)))
        try:
            yield match[1]
        finally:
            server.terminate()


@contextmanager
def running(*command: str) -> Iterator[None]:
    """Another process, until the block ends."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        time.sleep(SECONDS_TO_OPEN)
        try:
            yield
        finally:
            process.terminate()


def reader(address: str) -> AbstractContextManager[None]:
    """Somebody reads what a page is told."""
    return running("curl", "--silent", "--no-buffer", "--output", "/dev/null", f"{address}/live/events")


def chromium(address: str) -> AbstractContextManager[None]:
    """A browser shows the page."""
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
    return running(shutil.which("chromium") or "chromium", *options, "--remote-debugging-port=0", address)


async def tokens_per_second(address: str, options: argparse.Namespace) -> float:
    """What clients get that ask for as many answers at once as there are slots, for some seconds of decoding."""
    body = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, "temperature": 0}
    num_tokens = [0] * options.slots
    all_decode = asyncio.Event()

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        prompt = [100 + number] * options.prompt
        async with session.post("/v1/completions", json=body | {"prompt": prompt}) as answer:
            async for line in answer.content:
                num_tokens[number] += line.startswith(b'data: {"id"')
                if all(num_tokens):
                    all_decode.set()

    async with aiohttp.ClientSession(address, timeout=aiohttp.ClientTimeout(None)) as session:
        clients = [asyncio.create_task(client(session, number)) for number in range(options.slots)]
        await all_decode.wait()
        start, num_before = time.monotonic(), sum(num_tokens)
        await asyncio.sleep(options.seconds)
        rate = (sum(num_tokens) - num_before) / (time.monotonic() - start)
        assert not any(each.done() for each in clients), "a request ended: fewer seconds"
        for each in clients:
            each.cancel()
        await asyncio.wait(clients)
    return rate


def compared(found: list[float], plain: list[float]) -> str:
    """How much more or less than in the same round's turn without a page: the median, and two standard errors of it, as
    far as the middle half of the rounds shows them."""
    changes = [a / b - 1 for a, b in zip(found, plain, strict=True)]
    first, _, third = statistics.quantiles(changes)
    error = 1.25 * (third - first) / 1.35 / math.sqrt(len(changes))
    return f"{statistics.median(changes):+.1%} ± {2 * error:.1%}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--no-browser", action="store_true")
    options = parser.parse_args()
    print("; ".join(f"{name}: {value}" for name, value in describe_machine().items()))
    watchers = {"unwatched": None, "a reader": reader} | ({} if options.no_browser else {"a browser": chromium})
    with served(options) as address, served(options, "--no-ui") as without, served(options) as second:
        others = {"unwatched, --no-ui": without, "unwatched, another": second}
        rates: dict[str, list[float]] = {name: [] for name in (*watchers, *others)}
        for server in (without, second, address):
            asyncio.run(tokens_per_second(server, options))
        for number in range(options.rounds):
            turns = list(rates) if number % 2 else list(rates)[::-1]
            for name in turns:
                watch = watchers.get(name)
                with nullcontext() if watch is None else watch(address):
                    rates[name].append(asyncio.run(tokens_per_second(others.get(name, address), options)))
    for name, found in rates.items():
        print(
            f"{name:16} {statistics.median(found):8.1f} tokens/s ({min(found):.1f} to {max(found):.1f})",
            "" if name == "unwatched" else f"{compared(found, rates['unwatched'])} to unwatched",
        )


if __name__ == "__main__":
    main()
