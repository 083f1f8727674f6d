"""Mixed traffic on two replicas that are killed at random and reloaded now and then.

python -m tests.replicas.soak --minutes 60 --seed 1

Chats with growing histories, long prompts, sampled and structured outputs, several sequences, requests in the
background, batch jobs, readers that are slow and readers that leave; a third with one of several adapters, which do not
all fit into memory, or with one that comes and goes. Every request must end: whole, or with
`EngineDeadError` when its engine was killed; every line of a job must be answered, unless engines died of it twice.
Every tenth whole one is computed again by a lone engine, and must have the same tokens. At the end nothing may be left,
and memory may not have grown since the first quarter.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoModelForCausalLM

from inflight import LLM, AdapterError, AsyncLLM, EngineDeadError, SamplingParams, StructuredOutput
from inflight.contracts.api.config import BACKGROUND
from inflight.demo_model import DEMO_MODEL
from inflight.engine.process.connection import ProcessConnection
from inflight.server.app import create_app
from inflight.server.batches.answering import AppAnswerer
from inflight.server.serving.settings import ServerSettings
from tests.adapters.made import modules_of, write_adapter
from tests.batches.jobs import COMPLETIONS, Jobs

NUM_CLIENTS = 24
SECONDS_BETWEEN_KILLS = (2.0, 12.0)
SECONDS_BETWEEN_RELOADS = 90.0
LINES_OF_JOB = 200
NUM_ADAPTERS, BYTES_OF_ADAPTERS = 7, 1_000_000
PASSING = "passing"
"""The adapter that comes and goes."""
LONGEST_REQUEST = 300.0
"""Seconds. A longer wait counts as a hang."""
WORDS = ["a", "the", "fox", "owl", "tree", "river", "was", "and", "in", "little", "kind", "old", "went", "saw", "home"]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}}}


@dataclass
class Tally:
    """The outcomes of all requests.

    Attributes:
        to_check: prompts with their parameters, the folders of their adapters, and the tokens that they got.
        texts_to_check: prompts of lines of jobs, with how many tokens they asked for, and their texts.
    """

    ends: Counter[str] = field(default_factory=Counter)
    num_kills: int = 0
    num_reloads: int = 0
    to_check: list[tuple[list[int], SamplingParams, str | None, list[list[int]]]] = field(default_factory=list)
    texts_to_check: list[tuple[str, int, str]] = field(default_factory=list)


class Soak:
    """The traffic and the trouble.

    Args:
        llm: two replicas.
        folders: of adapters; `llm` knows all but the last.
        until: a time of `time.monotonic()`.
    """

    def __init__(self, llm: AsyncLLM, folders: list[str], until: float, seed: int) -> None:
        self.llm, self.folders, self.until, self.seed = llm, folders, until, seed
        self.tally = Tally()

    async def run(self) -> None:
        """Run clients, kills and reloads to their ends."""
        clients = [self._client(random.Random(f"{self.seed} {number}")) for number in range(NUM_CLIENTS)]
        with tempfile.TemporaryDirectory() as folder:
            jobs = Jobs(Path(folder), time.time)
            try:
                await asyncio.gather(self._kill(), self._reload(), self._come_and_go(), self._run_jobs(jobs), *clients)
            finally:
                jobs.database.close()

    async def _client(self, rng: random.Random) -> None:
        history = ""
        while time.monotonic() < self.until:
            if len(history) > 1200 or rng.random() < 0.1:
                history = ""
            prompt = history + " ".join(rng.choices(WORDS, k=rng.choice((3, 10, 10, 200)))) + "."
            params = self._params(rng)
            history = prompt + await asyncio.wait_for(self._ask(prompt, params, rng), LONGEST_REQUEST)

    def _params(self, rng: random.Random) -> SamplingParams:
        kind = rng.random()
        num_tokens = rng.choice((1, 8, 40, 120))
        if kind < 0.15:
            shape = StructuredOutput(json_schema=json.dumps(SCHEMA))
            return SamplingParams(max_tokens=num_tokens, seed=rng.randrange(1000), structured_output=shape)
        if kind < 0.3:
            return SamplingParams(max_tokens=num_tokens, seed=rng.randrange(1000), n=3, temperature=1.2)
        if kind < 0.5:
            return SamplingParams(max_tokens=num_tokens, seed=rng.randrange(1000), top_p=0.9, frequency_penalty=0.5)
        return SamplingParams(max_tokens=num_tokens, temperature=0)

    async def _ask(self, prompt: str, params: SamplingParams, rng: random.Random) -> str:
        """Follow one request; its text, if it got all of it."""
        is_slow, leaves = rng.random() < 0.1, rng.random() < 0.1
        priority = BACKGROUND if rng.random() < 0.2 else 0
        adapter = rng.choice(list(self.llm.adapters)) if rng.random() < 0.3 else None
        folder = None if adapter is None else self.llm.adapters[adapter]
        output = None
        try:
            async for output in self.llm.generate(prompt, params, priority=priority, adapter=adapter):
                if leaves and not output.finished:
                    self.tally.ends["left"] += 1
                    return ""
                if is_slow:
                    await asyncio.sleep(rng.random() / 10)
        except EngineDeadError:
            self.tally.ends["dead"] += 1
            return ""
        except AdapterError:
            assert adapter == PASSING  # which has gone meanwhile
            self.tally.ends["adapter gone"] += 1
            return ""
        assert output is not None
        for each in output.outputs:
            assert each.finish_reason in ("stop", "length"), (each.finish_reason, output.error)
        self.tally.ends["whole"] += 1
        if self.tally.ends["whole"] % 10 == 0:
            tokens = [each.token_ids for each in output.outputs]
            self.tally.to_check.append((output.prompt_token_ids, params, folder, tokens))
        return output.outputs[0].text

    async def _run_jobs(self, jobs: Jobs) -> None:
        """One batch job after the other."""
        rng = random.Random(f"{self.seed} jobs")
        answerer = AppAnswerer(create_app(self.llm, ServerSettings(model_name="demo")), self.llm)
        while time.monotonic() < self.until:
            bodies = [
                {"prompt": " ".join(rng.choices(WORDS, k=10)), "max_tokens": rng.choice((5, 60)), "temperature": 0}
                for _ in range(LINES_OF_JOB)
            ]
            lines = (
                {"custom_id": str(number), "method": "POST", "url": COMPLETIONS, "body": {"model": "demo", **body}}
                for number, body in enumerate(bodies)
            )
            job = jobs.create("".join(json.dumps(line) + "\n" for line in lines).encode())
            assert await jobs.worker(answerer, 8).work_on_next()
            results, errors = (jobs.lines(file) for file in (jobs.get(job).output_file_id, jobs.get(job).error_file_id))
            assert {int(each["custom_id"]) for each in (*results, *errors)} == set(range(LINES_OF_JOB)), errors
            assert len(results) + len(errors) == LINES_OF_JOB
            assert all(each["error"]["code"] == "engine_died" for each in errors), errors
            self.tally.ends["lines"] += len(results)
            self.tally.ends["lines dead"] += len(errors)
            for each in results[::10]:
                body = bodies[int(each["custom_id"])]
                text = each["response"]["body"]["choices"][0]["text"]
                self.tally.texts_to_check.append((body["prompt"], body["max_tokens"], text))

    async def _kill(self) -> None:
        rng = random.Random(f"{self.seed} kills")
        while time.monotonic() < self.until:
            await asyncio.sleep(rng.uniform(*SECONDS_BETWEEN_KILLS))
            sessions = list(self.llm._client.sessions().values())
            if len(sessions) == 2:  # one always lives
                connection = rng.choice(sessions).connection
                assert isinstance(connection, ProcessConnection)
                os.kill(connection.pid, signal.SIGKILL)
                self.tally.num_kills += 1
            await self.llm.start()

    async def _come_and_go(self) -> None:
        """Load an adapter and unload it, again and again."""
        rng = random.Random(f"{self.seed} adapters")
        while time.monotonic() < self.until:
            try:
                await self.llm.load_adapter(PASSING, self.folders[-1])
            except EngineDeadError:
                await self.llm.start()
                continue
            self.tally.ends["adapters loaded"] += 1
            await asyncio.sleep(rng.random())
            await self.llm.unload_adapter(PASSING)
            await asyncio.sleep(rng.random())

    async def _reload(self) -> None:
        while time.monotonic() + SECONDS_BETWEEN_RELOADS < self.until:
            await asyncio.sleep(SECONDS_BETWEEN_RELOADS)
            try:
                await self.llm.reload_weights()
            except EngineDeadError:  # the new one was killed while it was loaded
                self.tally.ends["reload failed"] += 1
            else:
                self.tally.num_reloads += 1


def num_wrong(tally: Tally, folders: list[str]) -> int:
    """The number of checked outputs that differ from those of a single engine."""
    adapters = {folder: folder for folder in folders}
    alone = LLM(max_num_seqs=1, enable_prefix_caching=False, speculation="off", adapters=adapters)
    wrong = 0
    for prompt, params, folder, tokens in tally.to_check:
        (output,) = alone.generate([prompt], params, use_tqdm=False, adapter=folder)
        wrong += [each.token_ids for each in output.outputs] != tokens
    for text, num_tokens, given in tally.texts_to_check:
        (output,) = alone.generate([text], SamplingParams(temperature=0, max_tokens=num_tokens), use_tqdm=False)
        wrong += output.outputs[0].text != given
    return wrong


def resident_mebibytes() -> int:
    """This process's."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20


async def soak(minutes: float, seed: int, folders: list[str]) -> Tally:
    """Run the traffic, and print the outcome."""
    adapters = {str(number): folder for number, folder in enumerate(folders[:-1])}
    options = {"num_blocks": 400, "max_num_seqs": 16, "adapters": adapters, "adapter_memory": BYTES_OF_ADAPTERS}
    llm = AsyncLLM(replicas=2, restart_delays=(0.0,) * 50, **options)
    began = time.monotonic()
    run = Soak(llm, folders, began + 60 * minutes, seed)
    async with llm:
        running = asyncio.ensure_future(run.run())
        memory = []
        while not running.done():
            await asyncio.wait([running], timeout=max(1.0, 60 * minutes / 20))
            memory.append(resident_mebibytes())
            print(f"{time.monotonic() - began:.0f} s: {dict(run.tally.ends)}, {memory[-1]} MiB", flush=True)
        await running
        while (stats := await llm.stats()).num_running or stats.num_waiting:
            await asyncio.sleep(0.1)
        assert stats.num_blocks_used == 0
        assert not llm._calls
        for session in llm._client.sessions().values():
            assert not session._mailboxes
        router = llm._client._router
        assert router is not None
        for replica in router._replicas:
            assert (replica.load.num_owed, replica.load.num_running) == (0, 0)
            assert (replica.background.num_owed, replica.background.num_running) == (0, 0)
    early = max(memory[: max(1, len(memory) // 4)])
    assert memory[-1] < 1.2 * early + 20, memory
    return run.tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        modules = modules_of(AutoModelForCausalLM.from_pretrained(DEMO_MODEL), "q_proj", "v_proj", "down_proj")
        folders = [write_adapter(Path(place, str(number)), modules, number, rank=8) for number in range(NUM_ADAPTERS)]
        tally = asyncio.run(soak(options.minutes, options.seed, folders))
        wrong = num_wrong(tally, folders)
    print(
        f"{dict(tally.ends)}; {tally.num_kills} kills, {tally.num_reloads} reloads; "
        f"{wrong} of {len(tally.to_check)} outputs, and of {len(tally.texts_to_check)} lines of jobs, differ from a "
        "lone engine's"
    )
    assert wrong == 0
    assert tally.ends["whole"]
    assert tally.ends["lines"]


if __name__ == "__main__":
    main()
