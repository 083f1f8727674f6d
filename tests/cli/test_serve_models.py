"""How `inflight serve` is told of several models."""

import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from inflight.cli.models import duration, named
from inflight.cli.serve import serve
from inflight.server.models.settings import PoolSettings


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What was started, and with what."""
    seen: dict[str, Any] = {}

    def start_one(model: str | None, host: str, port: int, names: tuple[str, ...], options: dict[str, Any]) -> None:
        seen.update(options, model=model, names=names)

    def start_several(models: PoolSettings, host: str, port: int, options: dict[str, Any]) -> None:
        seen.update(options, models=models)

    monkeypatch.setattr(sys.modules["inflight.cli.serve"], "serve_model", start_one)
    monkeypatch.setattr(sys.modules["inflight.cli.serve"], "serve_models", start_several)
    return seen


def run(*arguments: str, **variables: str) -> Result:
    return CliRunner().invoke(serve, arguments, env=variables)


def test_models_are_arguments_or_options_with_or_without_a_name(given: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    models = ("org/model", f"b={tmp_path}/any", str(tmp_path / "mine"), "c.gguf", "-m", "d=org/other:Q4_K_M")
    result = run(*models, "--max-loaded-models", "2", "--idle-unload", "10m", "--max-loaded-memory", "2GiB")
    assert result.exit_code == 0, result.output
    assert given["models"] == PoolSettings(
        models={
            "org/model": "org/model",
            "b": f"{tmp_path}/any",
            "mine": str(tmp_path / "mine"),
            "c.gguf": "c.gguf",
            "d": "org/other:Q4_K_M",
        },
        max_loaded_models=2,
        max_loaded_memory=2**31,
        idle_unload=600.0,
    )


def test_a_file_and_a_variable_may_have_several(given: dict[str, Any], tmp_path: Path) -> None:
    config = tmp_path / "serve.toml"
    config.write_text('model = ["a=x", "b=y"]\nidle-unload = "1h"')
    assert run("--config", str(config)).exit_code == 0
    assert given["models"] == PoolSettings(models={"a": "x", "b": "y"}, idle_unload=3600.0)
    printed = run("--config", str(config), "--print-config").output
    assert 'model = ["a=x", "b=y"]' in printed
    config.write_text(printed)
    assert run("--config", str(config)).exit_code == 0
    assert given["models"] == PoolSettings(models={"a": "x", "b": "y"}, idle_unload=3600.0)
    assert run(INFLIGHT_SERVE_MODEL="c=x, d=y").exit_code == 0
    assert given["models"].models == {"c": "x", "d": "y"}
    assert run("e=x", "f=y", "--config", str(config), INFLIGHT_SERVE_MODEL="c=x, d=y").exit_code == 0
    assert given["models"].models == {"e": "x", "f": "y"}


def test_a_single_model_is_served_as_ever(given: dict[str, Any], tmp_path: Path) -> None:
    assert run("org/model", "--max-loaded-models", "3").exit_code == 0
    assert (given["model"], given["names"]) == ("org/model", ())
    assert run("name=org/model", "--served-model-name", "other").exit_code == 0
    assert (given["model"], given["names"]) == ("org/model", ("name", "other"))
    assert run().exit_code == 0
    assert given["model"] is None
    assert run(INFLIGHT_SERVE_MODEL="a model").exit_code == 0
    assert given["model"] == "a model"
    assert "models" not in given
    assert run("--idle-unload", "90").exit_code == 0  # one that does not stay
    assert given["models"] == PoolSettings(models={"inflight-demo": None}, idle_unload=90.0)


def test_a_path_may_have_an_equals_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x=y").mkdir()
    assert named("x=y") == (None, "x=y")
    assert named("./a=b") == (None, "./a=b")
    assert named("a=b=c") == ("a", "b=c")
    assert named("org/a=./b") == ("org/a", "./b")
    assert named("a=") == (None, "a=")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--served-model-name", "x"), "--served-model-name goes neither with several models nor with --idle-unload"),
        (("--record", "x"), "--record goes neither"),
        (("--adapter", "a=x"), "--adapter goes neither with several models"),
        (("--tokenizer", "x"), "each model has its own"),
        (("--kv-events-config", "{}"), "--kv-events-config goes neither"),
        (("--rank-address", "host:1"), "--rank-address goes neither"),
        (("a=z",), "there are two models called 'a'; give one of them another name: NAME=MODEL"),
        (("--idle-unload", "soon"), "'soon' is no time; give seconds, or a number with a unit, such as 90s, 10m or 1h"),
        (("--max-loaded-models", "0"), "0 is not in the range"),
    ],
)
def test_what_does_not_go_with_several_models_is_refused(
    given: dict[str, Any], arguments: tuple[str, ...], message: str
) -> None:
    result = run("a=x", "b=y", *arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert not given


def test_durations_have_units() -> None:
    assert [duration(text) for text in ("90", "90s", "1.5m", "2H")] == [90.0, 90.0, 90.0, 7200.0]
    for text in ("", "0", "-1", "1d", "m"):
        with pytest.raises(click.BadParameter):
            duration(text)
