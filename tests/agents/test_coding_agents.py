"""Coding agents as their users run them: ten turns against the real server; they write files and run commands.

`make agents` installs them; those that are missing are skipped.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.agents.puppet import Puppet, puppet_server
from tests.server.serving import RunningServer

NUM_TURNS = 10
TASK = "Write the files."
AGENTS = Path(sys.prefix, "agents")
"""Where `make agents` puts them."""

Call = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Agent:
    """An agent.

    Attributes:
        command: with "{task}" and "{url}".
        write, run: the calls that write a file and run a command.
        environment: variables, with "{url}".
        files: files in its home, with "{url}".
    """

    command: list[str]
    write: Callable[[Path, str], Call]
    run: Callable[[str], Call]
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)


OPENAI = {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": "{url}/v1", "OPENAI_MODEL": "puppet"}
CODEX = """model = "puppet"
model_provider = "here"
[model_providers.here]
name = "here"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "OPENAI_API_KEY"
"""
OPENCODE = {
    "provider": {
        "here": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{url}/v1", "apiKey": "none"},
            "models": {"puppet": {"name": "puppet"}},
        }
    },
    "model": "here/puppet",
    "autoupdate": False,
    "share": "disabled",
}
CONTINUE = """name: here
version: 0.0.1
schema: v1
models:
  - {name: puppet, provider: openai, model: puppet, apiBase: "{url}/v1", apiKey: none, capabilities: [tool_use]}
"""
CLINE = {
    "version": 1,
    "lastUsedProvider": "openai-compatible",
    "providers": {
        "openai-compatible": {
            "settings": {
                "provider": "openai-compatible",
                "apiKey": "none",
                "model": "puppet",
                "baseUrl": "{url}/v1",
            },
            "updatedAt": "2026-11-29T00:00:00.000Z",
            "tokenSource": "manual",
        }
    },
}
"""What `cline auth` writes."""

CODING = {
    "claude": Agent(
        ["claude", "-p", "{task}", "--dangerously-skip-permissions", "--model", "puppet"],
        lambda path, text: ("Write", {"file_path": str(path), "content": text}),
        lambda command: ("Bash", {"command": command, "description": "Append a line"}),
        {
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_API_KEY": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",
        },
    ),
    "codex": Agent(
        ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "{task}"],
        lambda path, text: ("exec_command", {"cmd": f"printf %s {text!r} > {path}"}),
        lambda command: ("exec_command", {"cmd": command}),
        OPENAI,
        {".codex/config.toml": CODEX},
    ),
    "opencode": Agent(
        ["opencode", "run", "{task}"],
        lambda path, text: ("write", {"filePath": str(path), "content": text}),
        lambda command: ("bash", {"command": command, "description": "Append a line"}),
        {"OPENCODE_DISABLE_MODELS_FETCH": "1"},
        {".config/opencode/opencode.json": json.dumps(OPENCODE)},
    ),
    "qwen": Agent(
        ["qwen", "-p", "{task}", "--yolo", "--auth-type", "openai"],
        lambda path, text: ("write_file", {"file_path": str(path), "content": text}),
        lambda command: ("run_shell_command", {"command": command, "is_background": False}),
        OPENAI,
    ),
    "cn": Agent(
        ["cn", "--config", "{home}/config.yaml", "--auto", "-p", "{task}"],
        lambda path, text: ("Write", {"filepath": str(path), "content": text}),
        lambda command: ("Bash", {"command": command}),
        {"CONTINUE_TELEMETRY_ENABLED": "0"},
        {"config.yaml": CONTINUE},
    ),
    "cline": Agent(
        ["cline", "{task}"],
        lambda path, text: ("editor", {"path": str(path), "new_text": text}),
        lambda command: ("run_commands", {"commands": [command]}),
        {"CLINE_SESSION_BACKEND_MODE": "local"},  # else it leaves a daemon
        {".cline/data/settings/providers.json": json.dumps(CLINE)},
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with puppet_server() as server:
        yield server


def installed(name: str, *folder: str) -> str:
    path = AGENTS.joinpath(*folder, name)
    if not path.exists():
        pytest.skip(f"{name} is not installed (make agents)")
    return str(path)


def run_agent(server: RunningServer, agent: Agent, program: str, home: Path, given: str | None = None) -> str:
    """Run an agent in a folder of its own to its end; return what it prints."""

    def filled(text: str) -> str:
        for name, value in {"task": TASK, "url": server.url, "home": str(home)}.items():
            text = text.replace(f"{{{name}}}", value)
        return text

    work = home / "work"
    work.mkdir(parents=True)
    for name, text in agent.files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(filled(text))
    command = [program, *map(filled, agent.command[1:])]
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    environment = {**kept, "HOME": str(home), **{name: filled(text) for name, text in agent.environment.items()}}
    ended = subprocess.run(
        command, cwd=work, env=environment, input=given or "", capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("name", CODING)
def test_an_agent_writes_files_and_runs_commands_in_ten_turns(name: str, server: RunningServer, tmp_path: Path) -> None:
    assert isinstance(server.llm, Puppet)
    agent, home = CODING[name], tmp_path / "home"
    script = []
    for turn in range(NUM_TURNS - 1):
        path, text = home / "work" / f"{turn}.txt", f"number {turn}: é\n"
        called, arguments = agent.run(f"echo {turn} >> steps.txt") if turn % 2 else agent.write(path, text)
        call = json.dumps({"name": called, "arguments": arguments}, ensure_ascii=False)
        script.append(f"<think>\nStep {turn}.\n</think>\n\n<tool_call>\n{call}\n</tool_call>")
    server.llm.play([*script, "All is done."])
    program = installed(name, "node_modules", ".bin")
    assert "All is done." in run_agent(server, agent, program, home)
    for turn in range(0, NUM_TURNS - 1, 2):
        assert (home / "work" / f"{turn}.txt").read_text().startswith(f"number {turn}: é")
    assert (home / "work" / "steps.txt").read_text().split() == ["1", "3", "5", "7"]
    check_cached(server.llm)


def check_cached(llm: Puppet) -> None:
    """All turns ran, and each computed no more than the last call, its result, and what is new."""
    assert len(llm.answered) == NUM_TURNS
    for before, after in zip(llm.answered, llm.answered[1:], strict=False):
        assert after.num_cached_tokens > before.num_prompt_tokens - 2 * 16


@pytest.mark.thorough
def test_aider_edits_a_file_in_ten_turns(server: RunningServer, tmp_path: Path) -> None:
    """It has no tools: it reads the new file from the answer."""
    assert isinstance(server.llm, Puppet)
    program, home = installed("aider", "aider", "bin"), tmp_path / "home"
    options = ["--model", "openai/puppet", "--no-show-model-warnings", "--yes-always", "--no-check-update", "--no-git"]
    options += ["--edit-format", "whole", "--no-fancy-input", "--no-suggest-shell-commands", "../a.txt"]
    environment = {"OPENAI_API_KEY": "none", "OPENAI_API_BASE": "{url}/v1", "AIDER_ANALYTICS_DISABLE": "true"}
    agent = Agent(["aider", *options], lambda path, text: ("", {}), lambda command: ("", {}), environment)
    home.mkdir()
    (home / "a.txt").write_text("none\n")
    script = [f"Now:\n\n{home}/a.txt\n```\nnumber {turn}\n```\n" for turn in range(NUM_TURNS)]
    server.llm.play(script, mark="Change the file to")
    run_agent(server, agent, program, home, "".join(f"Change the file to {turn}.\n" for turn in range(NUM_TURNS)))
    assert (home / "a.txt").read_text() == f"number {NUM_TURNS - 1}\n"
    assert len(server.llm.answered) == NUM_TURNS
