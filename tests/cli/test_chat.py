"""`inflight chat` as a user runs it: with pipes and in a terminal, with a server and with its own engine."""

import asyncio
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest
from aiohttp import web

from inflight import LLM, SamplingParams
from inflight.demo_model import DEMO_MODEL
from tests.command import Command, Done
from tests.interrupts import heed_interrupts
from tests.loadtest.fake_server import Exchange, FakeServer, chat_chunk, refuse
from tests.ports import unused_port

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
COMMAND = [sys.executable, "-m", "inflight", "chat"]


Chat: TypeAlias = Callable[..., Done]


@pytest.fixture
def chat(command: Command) -> Chat:
    """Runs a chat with piped messages in the tests' own process."""

    def run(*arguments: object, lines: list[str]) -> Done:
        return command("chat", *arguments, stdin="".join(f"{line}\n" for line in lines))

    return run


async def repeat(exchange: Exchange) -> None:
    """Repeat the last message in pieces."""
    said = exchange.body["messages"][-1]["content"]
    pieces = [chat_chunk(content=letter) for letter in said]
    await exchange.send(chat_chunk(role="assistant", content=""), *pieces, chat_chunk("stop"), "[DONE]")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(repeat).in_thread() as server:
        yield server


# ------------------------------------------------------------------------------------------------------ with a server


def test_the_conversation_is_remembered_until_a_reset(server: FakeServer) -> None:
    lines = [
        "hello",
        "",
        "and  more ",
        "/system Be kind.",
        "again",
        "/reset",
        " /really",
        "/system",
        "end",
        "/quit",
        "x",
    ]
    command = [*COMMAND, "--url", server.url, "--system", "Be brief."]
    stdin = "".join(f"{line}\n" for line in [*lines, "never"])
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, env=ENVIRONMENT, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["hello", "and  more", "again", "/really", "end"]
    told = [[(m["role"], m["content"]) for m in body["messages"]] for body in server.bodies]
    hello = [("user", "hello"), ("assistant", "hello")]
    more = [("user", "and  more"), ("assistant", "and  more")]
    really = [("user", "/really"), ("assistant", "/really")]
    assert told == [
        [("system", "Be brief."), ("user", "hello")],
        [("system", "Be brief."), *hello, ("user", "and  more")],
        [("system", "Be kind."), *hello, *more, ("user", "again")],
        [("system", "Be kind."), ("user", "/really")],
        [*really, ("user", "end")],
    ]
    assert {body["model"] for body in server.bodies} == {"fake-1"}


def test_parameters_can_be_given_set_shown_and_unset(chat: Chat, server: FakeServer) -> None:
    lines = ["a", "/params temperature=0.25", '/params stop = ["x y"]', "b", "/params", "/params temperature=", "c"]
    done = chat("its-name", "--url", server.url, "--temperature", 1, "--max-tokens", 9, lines=lines)
    assert done.stderr.splitlines() == ["max_tokens=9", "temperature=0.25", 'stop=["x y"]']
    fields = [{k: v for k, v in body.items() if k not in ("messages", "stream")} for body in server.bodies]
    assert fields == [
        {"model": "its-name", "temperature": 1.0, "max_tokens": 9},
        {"model": "its-name", "temperature": 0.25, "max_tokens": 9, "stop": ["x y"]},
        {"model": "its-name", "max_tokens": 9, "stop": ["x y"]},
    ]


def test_a_failure_ends_a_script_with_the_reason_and_the_partial_answer(chat: Chat, server: FakeServer) -> None:
    async def behave(exchange: Exchange) -> web.Response | None:
        if len(server.exchanges) == 2:
            await exchange.send(chat_chunk(content="half"), {"error": {"message": "the engine died"}})
            return None
        await repeat(exchange)
        return None

    server.behave = behave
    done = chat("--url", server.url, lines=["one", "two", "three"])
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["one", "half"]
    assert "the engine died" in done.stderr
    assert len(server.exchanges) == 2


@pytest.mark.parametrize(
    ("lines", "code", "complaint"),
    [
        (["/nothing"], 2, "there is no command /nothing; /help lists all"),
        (["/params temperature"], 2, "'temperature' is not KEY=VALUE"),
        (["/params n=2"], 2, "n is 2; in a chat it must be 1"),
        (["/help", "/quit"], 0, "/system TEXT"),
    ],
)
def test_unknown_commands_are_reported(
    chat: Chat, server: FakeServer, lines: list[str], code: int, complaint: str
) -> None:
    done = chat("--url", server.url, lines=lines)
    assert (done.returncode, done.stdout) == (code, "")
    assert complaint in done.stderr


def test_engine_options_are_refused_with_a_server(chat: Chat, server: FakeServer) -> None:
    done = chat("--url", server.url, "--max-model-len", 5, lines=[])
    assert done.returncode == 2
    assert "--max-model-len is for an engine in this process" in done.stderr


def test_a_missing_server_is_reported(chat: Chat) -> None:
    with unused_port() as port:
        done = chat("--url", f"http://127.0.0.1:{port}", lines=["a"])
    assert (done.returncode, done.stdout) == (1, "")
    assert f"http://127.0.0.1:{port}: cannot connect" in done.stderr


# ------------------------------------------------------------------------------------------------------ in a terminal


class Terminal:
    """A chat in a terminal: typed input and visible output."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        self._seen = ""
        self._process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=ENVIRONMENT | {"TERM": "dumb"},
            start_new_session=True,
            preexec_fn=lambda: self._take(theirs),
        )
        os.close(theirs)

    @staticmethod
    def _take(terminal: int) -> None:
        """Runs in the child process: make this its controlling terminal."""
        heed_interrupts()
        os.close(os.open(os.ttyname(terminal), os.O_RDWR))

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, text: str) -> None:
        """Read until this text appears."""
        self.either(text)

    def either(self, *texts: str) -> str:
        """Read until one of these texts appears, and return it."""
        found = self._first(texts, 300)
        assert found is not None, f"none of {texts} comes; seen: {self._seen!r}"
        return found

    def interrupt_prompt(self) -> None:
        """Press Ctrl-C until there is a new prompt: Python's `input` misses one that arrives just before it waits."""
        for _ in range(20):
            self.type("\x03")
            if self._first(["> "], 3) is not None:
                return
        raise AssertionError(f"no new prompt comes; seen: {self._seen!r}")

    def _first(self, texts: Sequence[str], seconds: float) -> str | None:
        """Read until one of these texts appears, or until no output arrives for this time."""
        while not (places := {self._seen.index(text): text for text in texts if text in self._seen}):
            ready, _, _ = select.select([self._ours], [], [], seconds)
            if not ready:
                return None
            self._seen += os.read(self._ours, 4096).decode()
        found = places[min(places)]
        self._seen = self._seen.partition(found)[2]
        return found

    def kill(self) -> None:
        self._process.kill()
        self.end()

    def end(self) -> int:
        code = self._process.wait(300)
        os.close(self._ours)
        return code


def test_ctrl_c_stops_an_answer_and_not_the_chat_and_ctrl_d_ends_it(server: FakeServer) -> None:
    left = []

    async def behave(exchange: Exchange) -> web.Response | None:
        if len(server.exchanges) == 2:
            return refuse(500, "no luck")
        if len(server.exchanges) == 1:
            try:
                await exchange.send(chat_chunk(content="I will never"))
                while True:
                    await exchange.send(b": still there\n\n")
                    await asyncio.sleep(0.01)
            except ConnectionError:
                left.append(True)
                raise
        await repeat(exchange)
        return None

    server.behave = behave
    terminal = Terminal("--url", server.url)
    terminal.until("/help lists the commands, Ctrl-D ends")
    terminal.until("> ")
    terminal.type("talk\n")
    terminal.until("I will never")
    terminal.type("\x03")
    terminal.until("(stopped)")
    terminal.until("> ")
    terminal.type("fail\n")
    terminal.until("inflight: HTTP 500: no luck")
    terminal.until("> ")
    terminal.type("half a li")
    terminal.until("half a li")  # the echo
    terminal.interrupt_prompt()  # the typed text is discarded
    terminal.type("well\n")
    terminal.until("well\r\n")  # the echo
    terminal.until("well\r\n")  # the answer
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.end() == 0
    assert left == [True]
    assert [(m["role"], m["content"]) for m in server.bodies[-1]["messages"]] == [
        ("user", "talk"),
        ("assistant", "I will never"),
        ("user", "well"),
    ]


def test_ctrl_c_ends_a_script(server: FakeServer) -> None:
    async def behave(exchange: Exchange) -> None:
        await exchange.send(chat_chunk(content="I will never"))
        await asyncio.Event().wait()

    server.behave = behave
    command = [*COMMAND, "--url", server.url]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=ENVIRONMENT, preexec_fn=heed_interrupts, **pipes) as process:  # type: ignore[call-overload]
        try:
            process.stdin.write(b"a\nb\n")
            process.stdin.flush()
            assert process.stdout.read(12) == b"I will never"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=300)
        finally:
            process.kill()
    assert (process.returncode, out, err.strip()) == (130, b"\n", b"inflight: interrupted")
    assert len(server.exchanges) == 1


# ------------------------------------------------------------------------------------------------------ with an engine


@pytest.mark.thorough
def test_the_chat_with_its_own_engine_answers_like_the_library(chat: Chat) -> None:
    said = ["Tell me a story about a fox.", "Tell me another one.", "Once more."]
    lines = [*said[:2], "/params max_tokens=3", said[2], "/params top_pp=1"]
    done = chat("--temperature", 0, "--max-tokens", 30, lines=lines)
    assert done.returncode == 2  # for the last line
    llm, messages, expected = LLM(), list[dict[str, str]](), list[str]()
    for line, max_tokens in zip(said, (30, 30, 3), strict=True):
        messages.append({"role": "user", "content": line})
        (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=max_tokens), use_tqdm=False)
        expected.append(output.outputs[0].text)
        messages.append({"role": "assistant", "content": expected[-1]})
    assert done.stdout == "".join(f"{text}\n" for text in expected)
    assert done.stderr.count("(cut: max_tokens") >= 1
    assert "SamplingParams has no option 'top_pp'; did you mean 'top_p'?" in done.stderr


TEMPLATE = """{% if messages[0].role == "system" %}{{ raise_exception("System role not supported") }}{% endif %}
{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"""


@pytest.fixture
def without_system_role(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_a_system_prompt_that_the_template_refuses_changes_nothing(without_system_role: Path) -> None:
    terminal = Terminal("-m", str(without_system_role), "--max-tokens", "2", "--temperature", "0")
    terminal.until("> ")
    terminal.type("/system Be kind.\n")
    terminal.until("inflight: there can be no system prompt: ")
    terminal.until("System role not supported")
    terminal.until("> ")
    terminal.type("Tell me a story.\n")
    terminal.until("(cut: max_tokens")
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.end() == 0


def test_a_system_prompt_of_the_command_line_is_refused_at_once(chat: Chat, without_system_role: Path) -> None:
    done = chat("-m", without_system_role, "--system", "Be kind.", lines=["hello"])
    assert (done.returncode, done.stdout) == (2, "")
    assert "there can be no system prompt" in done.stderr


def test_a_server_that_refuses_a_system_prompt_can_go_on_without(chat: Chat, server: FakeServer) -> None:
    async def behave(exchange: Exchange) -> web.Response | None:
        if exchange.body["messages"][0]["role"] == "system":
            return refuse(400, "no system role")
        await repeat(exchange)
        return None

    server.behave = behave
    terminal = Terminal("--url", server.url, "--system", "Be kind.")
    terminal.until("> ")
    terminal.type("hello\n")
    terminal.until("/system without a text removes it")
    terminal.until("no system role")
    terminal.until("> ")
    terminal.type("/system\n")
    terminal.until("> ")
    terminal.type("again\n")
    terminal.until("again\r\n")  # the echo
    terminal.until("again\r\n")  # the answer
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.end() == 0


def test_ctrl_c_stops_an_answer_of_its_own_engine() -> None:
    for _ in range(5):
        terminal = Terminal("--temperature", "0", "--ignore-eos", "--max-tokens", "900")
        terminal.until("> ")
        terminal.type("Tell me a story about a fox.\n")
        terminal.until("fox.\r\n")  # the echo
        terminal.until(" ")  # the first word
        terminal.type("\x03")
        if terminal.either("(stopped)", "(cut: max_tokens") == "(stopped)":
            break
        terminal.kill()  # the answer had reached its last word before the interrupt
    else:
        raise AssertionError("no answer is stopped")
    terminal.type("/params max_tokens=4\n")
    terminal.type("Tell me another one.\n")
    terminal.until("(cut: max_tokens")
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.end() == 0
