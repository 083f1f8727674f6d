"""`inflight serve` in its own process, with tight limits, and what it reports about itself."""

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from tests.server.under_load.apis import LONG, PATHS, PROMPTS, SHORT, Json, ask, question

KEY = "sk-of-the-honest"
MAX_BODY, MAX_REQUESTS, MAX_WAITING, MAX_SEQS = 100_000, 120, 60, 32
LIMITS = {
    "--max-body-size": MAX_BODY,
    "--max-requests": MAX_REQUESTS,
    "--max-num-waiting": MAX_WAITING,
    "--max-num-seqs": MAX_SEQS,
    "--max-stall": 5,
    "--num-blocks": 150,
    "--grace-period": 100,
}


@dataclass
class Served:
    """The running command.

    Attributes:
        right: the correct text for an API, a prompt and a number of tokens, from a run of that request alone (for a
            long one, a run without faults).
    """

    process: asyncio.subprocess.Process
    url: str
    client: aiohttp.ClientSession
    log: Path
    right: dict[tuple[str, str, int], str] = field(default_factory=dict)

    async def learn(self) -> None:
        """Learn the correct texts."""

        async def learn_one(path: str, prompt: str, max_tokens: int) -> None:
            answer = await ask(self.client, path, question(path, prompt, max_tokens))
            assert answer.is_whole, answer
            self.right[path, prompt, max_tokens] = answer.text

        for path in PATHS:
            for prompt in PROMPTS:
                await learn_one(path, prompt, SHORT)
        await asyncio.gather(*(learn_one(path, PROMPTS[0], LONG) for path in PATHS))

    async def health(self) -> int:
        async with self.client.get("/health") as answer:
            return answer.status

    async def metrics(self) -> dict[str, float]:
        """All metrics, each summed over its labels."""
        found: dict[str, float] = {}
        async with self.client.get("/metrics") as answer:
            for line in (await answer.text()).splitlines():
                if not line.startswith("#"):
                    name = re.split("[{ ]", line)[0]
                    found[name] = found.get(name, 0) + float(line.rpartition(" ")[2])
        return found

    async def num_inside(self) -> float:
        """The number of sequences that run or wait."""
        metrics = await self.metrics()
        return metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]

    async def check_idle(self) -> None:
        """Return once nothing runs and no client is connected, and check that nothing was kept."""
        while await self.num_inside():
            pass
        while self.num_sockets() > 1:  # the listening socket
            assert await self.health() == 200
        metrics = await self.metrics()
        assert metrics["inflight:engine_up"] == 1
        assert metrics["vllm:kv_cache_usage_perc"] == 0

    def num_sockets(self) -> int:
        """The number of sockets bound to the server's port: one listens, the others are client connections."""
        port = f":{int(self.url.rpartition(':')[2]):04X}"
        own = set()
        for path in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                own.add(os.readlink(path))
        lines = [line.split() for line in Path(f"/proc/{self.process.pid}/net/tcp").read_text().splitlines()[1:]]
        return sum(line[1].endswith(port) and f"socket:[{line[9]}]" in own for line in lines)

    def engine_pid(self) -> int:
        """The process id of the engine, a child of the server."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(FileNotFoundError, ProcessLookupError):
                if int(path.read_text().rpartition(")")[2].split()[1]) == self.process.pid:
                    found.append(int(path.parent.name))
        (pid,) = found
        return pid

    def lines(self) -> list[Json]:
        """The lines that the server has logged."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[Served]:
    (folder / "keys").write_text(KEY)
    options = [str(part) for option in LIMITS.items() for part in option]
    options += ["--api-key-file", str(folder / "keys"), "--dtype", "float32", "--log-format", "json"]
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "inflight", "serve", "--port", "0", *options),
            stderr=log,
        )
    try:
        while not (match := re.search(r"is served at (http://127\.0\.0\.1:\d+)", (folder / "log").read_text())):
            assert process.returncode is None, (folder / "log").read_text()
            await asyncio.sleep(0.01)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        headers = {"Authorization": f"Bearer {KEY}"}
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(match[1], connector=connector, headers=headers, timeout=timeout) as client:
            yield Served(process, match[1], client, folder / "log")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
