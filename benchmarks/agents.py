"""An agent's session over HTTP: every turn sends the whole history again, with a few hundred new tokens.

python -m benchmarks.agents turns [--model qwen3-0.6b] [--quantization int8] [--peers llamacpp,vllm]
python -m benchmarks.agents pauses
python -m benchmarks.agents simulate
python -m benchmarks.agents overhead

`turns`: ten turns of one agent, a system prompt and tools of 20,000 tokens, each turn 400 new ones: the time to the
first token of each turn. `pauses`: four agents at once whose tools take 5 to 60 seconds, and a cache for two of them,
with blocks kept for sessions and without; `simulate`: the same on the scheduler with a virtual clock. `overhead`: 32
streams of chats whose answers have thoughts and a call, and of completions with the same tokens. Texts are letters
drawn at random, one token each with a tokenizer of bytes. Peers are installed with `benchmarks/compare.py --install`.
"""

import argparse
import json
import os
import random
import selectors
import signal
import socket
import string
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.compare import LOGS, describe_machine
from benchmarks.peers.catalogue import PEERS
from benchmarks.peers.models import model_folder, prepare
from benchmarks.scripted_model import scripted_model
from benchmarks.serving import Server
from inflight.contracts.api.config import EngineConfig
from inflight.simulate import StepCost
from inflight.simulate.requests import SimulatedRequest
from inflight.simulate.simulated_engine import SimulatedEngine

NUM_TURNS, NUM_AGENTS = 10, 4
PROMPT, ADDED, ANSWER = 20_000, 400, 24
"""Tokens of the system prompt with its tools, and of each turn's new text and answer."""
PAUSES = (5.0, 60.0)
"""Seconds that a tool takes at least and at most."""
KEPT = 300.0
"""Seconds for which blocks are kept at most, which is the default."""
NUM_STREAMS, SHORT, THOUGHT, VALUE, NUM_ROUNDS = 32, 100, 100, 100, 7
"""Of `overhead`: streams at once, characters of their questions, thoughts and arguments, and rounds of each kind."""


def text(rng: random.Random, length: int) -> str:
    """Return words of random letters."""
    return "".join(rng.choice(string.ascii_lowercase + " ") for _ in range(length))


@dataclass(slots=True)
class Turn:
    """What one request took.

    Attributes:
        first_token, whole: seconds from the request to its first token, and to its end.
        num_prompt_tokens, num_cached_tokens: as the server counts them.
    """

    first_token: float
    whole: float
    num_prompt_tokens: int
    num_cached_tokens: int


class Agent:
    """One session with a server.

    Args:
        number: its random texts differ from those of others.
        prompt: tokens of its system prompt and tools, about.
        added, answer: tokens of each turn's new text and answer.
    """

    def __init__(self, url: str, number: int, prompt: int = PROMPT, added: int = ADDED, answer: int = ANSWER) -> None:
        self._url, self._rng = url, random.Random(number)
        self._added, self._answer = added, answer
        names = [f"tool_{text(self._rng, 8).replace(' ', '_')}" for _ in range(20)]
        self._tools = [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": text(self._rng, 300),
                    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
                },
            }
            for name in names
        ]
        self._tools = self._tools[: prompt // 1000]
        rest = max(1, prompt - len(json.dumps(self._tools)))
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": text(self._rng, rest)}]

    def body(self) -> dict[str, Any]:
        """Return the next request: the history with new text."""
        self._messages.append({"role": "user", "content": text(self._rng, self._added)})
        return {"messages": self._messages, "tools": self._tools or None, "max_tokens": self._answer, "temperature": 0}

    def turn(self) -> Turn:
        """Send the next request, and add the answer to the history."""
        body = self.body()
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        request = urllib.request.Request(
            f"{self._url}/v1/chat/completions",
            json.dumps({**body, **stream}).encode(),
            {"Content-Type": "application/json"},
        )
        start, first = time.perf_counter(), None
        usage: dict[str, Any] = {}
        with urllib.request.urlopen(request) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    if choice["delta"].get("content") or choice["delta"].get("reasoning_content"):
                        first = first or time.perf_counter()
        end = time.perf_counter()
        self._messages.append(
            {"role": "assistant", "content": text(self._rng, self._answer)}
        )  # a random model's has no sense
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return Turn((first or end) - start, end - start, usage["prompt_tokens"], cached)

    def work(self, scale: float) -> float:
        """Run all turns with pauses between them; return the seconds from the first to the end of the last."""
        start = time.perf_counter()
        for number in range(NUM_TURNS):
            if number:
                time.sleep(self._rng.uniform(*PAUSES) / scale)
            self.turn()
        return time.perf_counter() - start


def ours(arguments: argparse.Namespace, *options: str) -> Server:
    """Return our server."""
    folder = str(model_folder(arguments.model))
    command = [sys.executable, "-m", "inflight", "serve", folder, "--port", "{port}", *options]
    if arguments.quantization:
        command += ["--quantization", arguments.quantization]
    return Server(" ".join(["inflight", *options]), command, ())


def llamacpp(arguments: argparse.Namespace) -> Server:
    """Return llama.cpp's server: eight bits if we quantize, else 16."""
    peer = PEERS["llamacpp"]
    quantization = "int8" if arguments.quantization else None
    file = prepare(peer, model_folder(arguments.model), "bfloat16", quantization)
    command = [str(peer.root / "build" / "bin" / "llama-server"), "-m", str(file), "--port", "{port}"]
    if "amx_int8" in Path("/proc/cpuinfo").read_text():
        command.append("--no-repack")  # see `peers.llamacpp_server`
    return Server("llama-server", [*command, "-np", "1", "-c", "32768", "-t", "2", "-tb", "2", "--jinja"], ())


def vllm(arguments: argparse.Namespace) -> Server:
    """Return vLLM's server, in bfloat16 and as `peers.vllm_cpu` runs it. (Its script does not start in builds that have
    another package's name.)"""
    root = PEERS["vllm"].root
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
    environment = [f"VLLM_CPU_OMP_THREADS_BIND={cores}", "VLLM_CPU_NUM_OF_RESERVED_CPU=0", "VLLM_CPU_KVCACHE_SPACE=4"]
    environment += [f"PATH={root / 'bin'}:{os.environ['PATH']}", f"LD_PRELOAD={root / 'lib' / 'libiomp5.so'}"]
    command = ["env", *environment, str(root / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model_folder(arguments.model)), "--port", "{port}", "--dtype", "bfloat16"]
    command += ["--max-model-len", "32768", "--enable-prefix-caching"]
    command += ["--enable-prompt-tokens-details", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    return Server("vllm", command, ())


@contextmanager
def running(server: Server) -> Iterator[str]:
    """Start a server; yield its address; end it."""
    try:
        server.start(2, LOGS / f"agents-{server.name.split()[0]}.log")
        server.signal(signal.SIGCONT)
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.end()


def turns(arguments: argparse.Namespace) -> None:
    """Measure one agent on each server, one after the other."""
    kinds = {"llamacpp": llamacpp, "vllm": vllm}
    servers = [ours(arguments), *(kinds[name](arguments) for name in filter(None, arguments.peers.split(",")))]
    print("; ".join(f"{name}: {value}" for name, value in describe_machine().items()))
    print("| server | " + " | ".join(f"turn {n + 1}" for n in range(NUM_TURNS)) + " | sum | turns 2 to 10 / turn 1 |")
    for server in servers:
        with running(server) as url:
            Agent(url, 99, prompt=200).turn()  # warm-up
            agent = Agent(url, 0, int(PROMPT / arguments.scale))
            taken = [agent.turn() for _ in range(NUM_TURNS)]
            firsts = [each.first_token for each in taken]
            share = mean(firsts[1:]) / firsts[0]
            print(
                f"| {server.name} | {' | '.join(f'{each:.2f}' for each in firsts)} | {sum(firsts):.1f} | {share:.1%} |"
            )
            new = [each.num_prompt_tokens - each.num_cached_tokens for each in taken]
            print(f"| tokens computed | {' | '.join(map(str, new))} | {sum(new)} | |", flush=True)


def pauses(arguments: argparse.Namespace) -> None:
    """Measure several agents at once, with retention and by recency alone."""
    prompt, added, answer = (max(1, int(each / arguments.scale)) for each in (PROMPT, ADDED, ANSWER))
    num_blocks = 2 * (prompt + NUM_TURNS * (added + answer + 70)) // 16
    for seconds in (KEPT, 0.0):
        server = ours(arguments, "--num-blocks", str(num_blocks), "--prefix-retention", str(seconds))
        with running(server) as url, ThreadPoolExecutor(NUM_AGENTS) as pool:
            agents = [Agent(url, number, prompt, added, answer) for number in range(NUM_AGENTS)]
            jobs = list(pool.map(lambda agent: agent.work(arguments.scale), agents))
            print(f"{server.name}: mean {mean(jobs):.0f} s, each {', '.join(f'{job:.0f}' for job in jobs)}", flush=True)


def simulate(arguments: argparse.Namespace) -> None:
    """The same agents on a virtual clock, for several speeds of prefill."""
    print("| tokens/s of prefill | by recency | kept | times as fast |")
    for speed in (250, 500, 1000, 2000):
        recent, kept = (mean(mean(simulated(limit, speed, seed)) for seed in range(3)) for limit in (0.0, KEPT))
        print(f"| {speed} | {recent:.0f} s | {kept:.0f} s | {recent / kept:.2f} |", flush=True)


def simulated(limit: float, speed: float, seed: int) -> list[float]:
    """Return each agent's seconds if blocks are kept for at most `limit`."""
    rng = random.Random(seed)
    num_blocks = 2 * (PROMPT + NUM_TURNS * (ADDED + ANSWER)) // 16
    config = EngineConfig(num_blocks=num_blocks, max_num_seqs=8, prefix_retention=limit)
    ended: list[str] = []
    engine = SimulatedEngine(config, StepCost.linear(0.04, 1 / speed), limits_prefill=True, on_end=ended.append)
    history = [[rng.randrange(50_000) for _ in range(PROMPT)] for _ in range(NUM_AGENTS)]
    coming = [(rng.random(), agent, 0) for agent in range(NUM_AGENTS)]
    begun, seconds = [arrival for arrival, _, _ in coming], [0.0] * NUM_AGENTS
    while coming or engine.has_unfinished_requests:
        for arrival, agent, turn in [each for each in coming if each[0] <= engine.clock]:
            coming.remove((arrival, agent, turn))
            history[agent] += [rng.randrange(50_000) for _ in range(ADDED)]
            engine.submit(SimulatedRequest(f"{agent} {turn}", arrival, list(history[agent]), (ANSWER,)))
        if not engine.step(min(coming)[0] if coming else inf) and coming:
            engine.clock = max(engine.clock, min(coming)[0])
        for agent, turn in (map(int, each.split()) for each in ended):
            seconds[agent] = engine.clock - begun[agent]
            if turn + 1 < NUM_TURNS:
                coming.append((engine.clock + rng.uniform(*PAUSES), agent, turn + 1))
        ended.clear()
    return seconds


def overhead(arguments: argparse.Namespace) -> None:
    """Measure many streams of a scripted model as chats with tools, whose thoughts and calls are read, and as
    completions of the same tokens, in turn."""
    rng = random.Random(1)
    script = answer_text(text(rng, THOUGHT).strip(), "look_up", json.dumps({"path": text(rng, VALUE)}))
    arguments.model, streamed = scripted_model(arguments.model, script)
    with running(server := ours(arguments)) as url:
        assert server.process is not None
        first = Agent(url, 0, prompt=1_000).body()
        questions = [{"role": "user", "content": text(rng, SHORT)} for _ in range(NUM_STREAMS)]
        look_up = {"name": "look_up", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}
        tools = [*first["tools"], {"type": "function", "function": look_up}]
        bodies = [{**first, "messages": [question], "tools": tools} for question in questions]
        chats = [{**body, "max_tokens": 1, "return_token_ids": True} for body in bodies]
        prompts = [json.loads(answer)["prompt_token_ids"] for answer in answers(url, "chat/completions", chats)]
        options = {"temperature": 0, "max_tokens": 2 * streamed, "stream": True}
        kinds = {
            "completions": [{**options, "prompt": prompt} for prompt in prompts],
            "chat/completions": [{**body, **options} for body in bodies],
        }
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        front: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(1 + NUM_ROUNDS):  # in the first one, parts of blocks are computed
            for kind, requests in kinds.items():
                start, before = time.perf_counter(), cpu_seconds(server.process.pid)
                read = answers(url, kind, requests)
                if number:
                    seconds[kind].append(time.perf_counter() - start)
                    front[kind].append(cpu_seconds(server.process.pid) - before)
                assert all(written(each, kind) == script for each in read)
    print("; ".join(f"{name}: {value}" for name, value in describe_machine().items()))
    for kind, each in seconds.items():
        speeds = [NUM_STREAMS * streamed / taken for taken in each]
        work = 1e6 * median(front[kind]) / (NUM_STREAMS * streamed)
        print(f"{kind}: {median(speeds):.1f} tokens/s ({min(speeds):.1f} to {max(speeds):.1f})", end=", ")
        print(f"{work:.0f} us of the server's own processor time for each")
    shares = [chat / raw for raw, chat in zip(*seconds.values(), strict=True)]
    print(f"chats take {median(shares):.3f} times as long ({min(shares):.3f} to {max(shares):.3f})")


def answer_text(thoughts: str, name: str, arguments: str) -> str:
    """Return an answer with thoughts and a call, as a model writes it."""
    return f'<think>\n{thoughts}\n</think>\n\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def written(stream: bytes, kind: str) -> str:
    """Return the text of a streamed answer as the model wrote it."""
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    if kind == "completions":
        return "".join(choice["text"] for choice in choices)
    deltas = [choice["delta"] for choice in choices]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    thoughts = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    return answer_text(thoughts, *("".join(call.get(part) or "" for call in calls) for part in ("name", "arguments")))


def cpu_seconds(process: int) -> float:
    """The processor time that a process has used, without its children (here: without the engine)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def answers(url: str, path: str, bodies: Sequence[Any]) -> list[bytes]:
    """Send all requests at once and return the bodies of their answers, with little work on the server's cores."""
    received: dict[socket.socket, bytearray] = {}
    host, port = url.removeprefix("http://").split(":")
    with selectors.DefaultSelector() as selector:
        for body in bodies:
            written = json.dumps(body).encode()
            head = (
                f"POST /v1/{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
            )
            connection = socket.create_connection((host, int(port)))
            connection.sendall(f"{head}Content-Length: {len(written)}\r\n\r\n".encode() + written)
            received[connection] = bytearray()
            selector.register(connection, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                assert isinstance(key.fileobj, socket.socket)
                if more := key.fileobj.recv(2**16):
                    received[key.fileobj] += more
                else:
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
    return [bytes(each).partition(b"\r\n\r\n")[2] for each in received.values()]


def main() -> None:
    """Run one of the four."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("turns", "pauses", "simulate", "overhead"))
    parser.add_argument(
        "--model", default="qwen3-0.6b", help="a named model, or a folder whose chat template takes tools"
    )
    parser.add_argument("--quantization", help="of our weights; llama.cpp then has eight bits")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="prompts of `turns`, and all of `pauses`, are so much shorter"
    )
    parser.add_argument("--peers", default="", help="of `turns`: llamacpp, vllm")
    arguments = parser.parse_args()
    {"turns": turns, "pauses": pauses, "simulate": simulate, "overhead": overhead}[arguments.what](arguments)


if __name__ == "__main__":
    main()
