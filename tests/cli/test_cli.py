"""The command as a user runs it, in its own process with pipes if that makes a difference."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import urllib.request
from pathlib import Path
from typing import Any

import click
import pytest
from transformers import AutoConfig

from inflight.cli import app
from inflight.demo_model import DEMO_MODEL
from inflight.execution.hf.load import has_fast_bfloat16
from tests import zoo
from tests.command import Command
from tests.interrupts import interrupted_after_a_line

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}


def inflight(*arguments: object, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "inflight", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=ENVIRONMENT, timeout=600)


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer: prompts are token ids."""
    path = tmp_path_factory.mktemp("llama")
    zoo.build("llama").save_pretrained(path)
    return path


def test_help_comes_without_waiting_for_torch(command: Command) -> None:
    code = "import sys; sys.argv = ['inflight', '--help']; sys.stdout = sys.stderr\nimport inflight.cli\n"
    code += "print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.stderr.strip() == "False False"
    assert "Usage: " in command("generate", "--help").stdout


def test_every_option_of_every_command_has_help() -> None:
    options = [option for command in app.commands.values() for option in command.params if option.name != "help"]
    assert len(options) > 30
    assert [option.name for option in options if isinstance(option, click.Option) and not option.help] == []


def test_one_prompt_is_streamed_as_text() -> None:
    done = inflight("generate", "Once upon a time", "--max-tokens", 20, "--temperature", 0)
    assert done.returncode == 0
    assert done.stderr == ""
    assert len(done.stdout.split()) > 5
    assert "{" not in done.stdout


def test_many_prompts_give_json_lines_in_order_and_progress_on_standard_error(command: Command) -> None:
    done = command("generate", "Once upon a time", "One morning", "Long ago", "--max-tokens", 9, "--seed", 1)
    assert done.returncode == 0
    lines = lines_of(done.stdout)
    assert [line["prompt"] for line in lines] == ["Once upon a time", "One morning", "Long ago"]
    assert all(line["num_output_tokens"] <= 9 and line["text"] for line in lines)
    assert "tokens/s" in done.stderr
    assert command("generate", "a", "b", "--max-tokens", 2, "--quiet").stderr == ""


def test_prompts_are_read_from_standard_input_and_files(command: Command, tmp_path: Path) -> None:
    piped = inflight("generate", "--max-tokens", 5, "--temperature", 0, stdin="Once upon a time\n\nOne morning\n")
    assert [line["prompt"] for line in lines_of(piped.stdout)] == ["Once upon a time", "One morning"]
    assert "tokens/s" in piped.stderr
    (tmp_path / "prompts.txt").write_text("\ufeffOnce upon a time\nOne morning\n")
    out = tmp_path / "out.jsonl"
    written = command("generate", "-f", tmp_path / "prompts.txt", "-o", out, "--max-tokens", 5, "--temperature", 0)
    assert (written.returncode, written.stdout) == (0, "")
    assert lines_of(out.read_text()) == lines_of(piped.stdout)


def test_each_json_line_has_its_own_parameters(command: Command, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    requests = [
        {"prompt_token_ids": [1, 2, 3], "max_tokens": 4, "custom_id": "first"},
        {"prompt_token_ids": [4, 5], "max_tokens": 2, "n": 2},
        [7, 8, 9],
    ]
    file.write_text("".join(json.dumps(request) + "\n" for request in requests))
    done = command("generate", "-m", folder, "-f", file, "--temperature", 0, "--max-tokens", 3)
    lines = lines_of(done.stdout)
    assert [(line["prompt_index"], line["index"], len(line["token_ids"])) for line in lines] == [
        (0, 0, 4),
        (1, 0, 2),
        (1, 1, 2),
        (2, 0, 3),
    ]
    assert lines[0]["custom_id"] == "first"
    assert lines[0]["token_ids"] == zoo.plain_greedy(zoo.build("llama"), [1, 2, 3], 4)


def test_chats_use_the_chat_template(command: Command) -> None:
    done = command("generate", "--chat", "Tell me a story.", "--max-tokens", 12)
    assert done.returncode == 0
    assert done.stdout.strip()


@pytest.mark.parametrize(
    ("arguments", "stdin", "sentence"),
    [
        (["x", "--temperature", "-1"], "", "temperature is -1.0"),
        (["x", "--top-p", "2"], "", "top_p is 2.0"),
        (["x", "--max-tokens", "0"], "", "max_tokens is 0"),
        (["x", "--dtype", "int3"], "", "int3"),
        (["x", "--temprature", "1"], "", "--temprature"),
        (["x", "--model", "/nowhere/at/all"], "", "there is no model folder '/nowhere/at/all'"),
        (["x", "--model", "/"], "", "the folder '/' has no config.json; give a folder"),
        (["x", "--dtype", "float16"], "", "unusably slow on a CPU"),
        (["one", ""], "", "prompt 1: the prompt is empty"),
        ([], "", "there are no prompts"),
        ([], '{"prompt": "x"}\n{"prompt": \n', "line 2 of standard input is not JSON"),
        ([], '{"prompt": "x", "temprature": 1}', "line 1 of standard input: SamplingParams has no option 'temprature'"),
        (["--file", "/nowhere/at/all.txt"], "", "the prompt file '/nowhere/at/all.txt' cannot be read"),
    ],
)
def test_a_mistake_of_the_caller_is_one_sentence_and_exit_code_2(
    refused: Command, arguments: list[str], stdin: str, sentence: str
) -> None:
    done = refused("generate", *arguments, stdin=stdin)
    assert sentence in done.stderr
    assert done.stdout == ""


def test_a_model_that_fails_preparation_gives_exit_code_2(refused: Command, tmp_path: Path) -> None:
    AutoConfig.for_model("bloom", vocab_size=64, hidden_size=32, n_layer=2, n_head=2).save_pretrained(tmp_path)
    done = refused("generate", "x", "-m", tmp_path, "--load-format", "dummy", "--executor", "packed")
    assert done.stdout == ""
    assert done.stderr == (
        "inflight: BloomForCausalLM does its attention itself instead of calling the attention function that it is "
        "given, so its sequences cannot be kept apart in a packed row\n"
    )


def test_corrupt_weights_give_exit_code_2(folder: Path, tmp_path: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    done = inflight("info", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert str(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interrupt_writes_the_finished_outputs(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    short = {"prompt_token_ids": [1], "max_tokens": 2}
    long = {"prompt_token_ids": [2], "max_tokens": 200}
    file.write_text("".join(json.dumps(request) + "\n" for request in [short, long, short, *[long] * 500]))
    command = [sys.executable, "-m", "inflight", "generate", "-m", str(folder), "-f", str(file), "--quiet"]
    printed, errors = interrupted_after_a_line([*command, "--max-num-seqs", "4"], ENVIRONMENT)
    indices = [line["prompt_index"] for line in lines_of(printed)]
    assert indices[0] == 0
    assert 2 in indices, "it had finished, though the one before it had not"
    assert len(indices) < 503
    assert errors.strip() == "inflight: interrupted"


def test_info_shows_what_preparation_found(command: Command, folder: Path) -> None:
    done = command("info", folder, "--json")
    found = json.loads(done.stdout)
    assert found["model_class"] == "LlamaForCausalLM"
    assert found["executor"] == "packed"
    assert found["attention_calls"] == ["3 x 4 heads over 2 key/value heads of size 16"]
    assert (found["checkpoint_dtype"], found["dtype"]) == ("float32", "float32")
    assert found["cache_bytes"] == found["num_blocks"] * found["block_size"] * found["kv_bytes_per_token"]
    assert found["has_chat_template"] is False
    lines = dict(
        line.split(maxsplit=1) for line in map(str.rstrip, command("info", folder).stdout.splitlines()) if line
    )
    assert lines["model"].startswith("LlamaForCausalLM, ")
    assert lines["context"] == f"{found['max_model_len']} tokens"
    assert "a token" in lines["cache"]
    other = command("info", folder, "--dtype", "bfloat16", "--num-blocks", 10).stdout
    assert re.search(r"^computes +in bfloat16; the checkpoint is in float32 *$", other, re.MULTILINE)
    assert re.search(r"^cache +60 KiB: 10 blocks of 16 tokens, 384 bytes a token", other, re.MULTILINE)


@pytest.mark.skipif(not has_fast_bfloat16(), reason="bfloat16 is not faster on this CPU")
def test_info_says_where_bfloat16_is_faster(command: Command) -> None:
    assert "--dtype bfloat16" in command("info").stdout
    assert "--dtype bfloat16" not in command("info", "--dtype", "bfloat16").stdout


def test_messages_of_a_failed_download_come_once() -> None:
    code = """
from inflight.cli.options import quiet_libraries
quiet_libraries()
from huggingface_hub.utils import logging
logging.get_logger("huggingface_hub.utils._http").warning("Retrying in 1s")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert done.stderr == "inflight: Retrying in 1s\n"


@pytest.mark.thorough
def test_loading_prints_nothing_into_a_pipe_and_leaves_nothing_on_a_terminal() -> None:
    code = f"from inflight import LLM; llm = LLM({str(DEMO_MODEL)!r}, num_blocks=8); llm.generate([]); dir(llm)"
    piped = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert (piped.stdout, piped.stderr) == ("", "")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    try:
        subprocess.run([sys.executable, "-c", code], stderr=theirs, check=True, env=ENVIRONMENT | {"TERM": "xterm"})
        os.write(theirs, b"end")
        seen = b""
        while not seen.endswith(b"end"):
            seen += os.read(ours, 65536)
    finally:
        os.close(ours)
        os.close(theirs)
    assert b"Loading weights" in seen
    assert seen.rpartition(b"\r")[2] == b"end", "the last line was wiped"
    assert b"\n" not in seen


def test_the_public_names_are_listed() -> None:
    import inflight as package

    assert dir(package) == sorted(package.__all__)
    assert all(hasattr(package, name) for name in package.__all__)


def test_demo_runs_to_its_end_without_a_terminal(command: Command) -> None:
    done = command("demo")
    assert done.returncode == 0
    assert "tokens/s" in done.stdout
    assert "occupied" in done.stdout


def test_options_of_the_demo_that_do_nothing_are_refused(command: Command) -> None:
    for options in (("--port", "8001"), ("--no-browser",), ("--web", "--slow")):
        done = command("demo", *options)
        assert done.returncode == 2
        assert "--web" in done.stderr


def test_the_demo_can_be_watched_in_a_browser() -> None:
    command = [sys.executable, "-m", "inflight", "demo", "--web", "--no-browser", "--slots", "3"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            match = next(filter(None, (re.search(r"watch it at (\S+);", line) for line in process.stdout)), None)
            assert match, process.stderr.read()
            with urllib.request.urlopen(f"{match[1]}/live/events", timeout=60) as events:
                messages = (json.loads(line[6:]) for line in events if line.startswith(b"data: "))
                assert any(len(engine["running"]) == 3 for each in messages for engine in each["engines"].values())
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
