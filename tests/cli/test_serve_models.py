"""`inflight serve` with several models: options and configuration files."""

import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from inflight.cli.models import duration, named
from inflight.cli.serve import Address, serve
from inflight.server.models.pool import PoolSettings


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What was started, and with what."""
    seen: dict[str, Any] = {}

    def start_one(model: str | None, address: Address, names: tuple[str, ...], options: dict[str, Any]) -> None:
        seen.update(options, model=model, names=names)

    def start_several(models: PoolSettings, address: Address, options: dict[str, Any]) -> None:
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


TABLES = """
model = "a=x"
dtype = "float32"

[models.b]
model = "y"
dtype = "bfloat16"
max_model_len = 100
kv-cache-memory = "2GiB"
adapter = ["fix=./fix"]

[models."org/c"]
model = "z"
tool-call-parser = "hermes"
strict = true
"""


def test_a_file_may_have_options_for_each_model(given: dict[str, Any], tmp_path: Path) -> None:
    config = tmp_path / "serve.toml"
    config.write_text(TABLES)
    result = run("--config", str(config))
    assert result.exit_code == 0, result.output
    first = given["models"]
    own = {"dtype": "bfloat16", "max_model_len": 100, "kv_cache_memory": 2**31, "adapters": {"fix": "./fix"}}
    assert first == PoolSettings(
        models={"a": "x", "b": "y", "org/c": "z"},
        own_options={"b": own, "org/c": {"tool_call_parser": "hermes", "strict": True}},
    )
    assert given["dtype"] == "float32"
    assert first.adapters == {"fix": "b"}
    config.write_text(run("--config", str(config), "--print-config").output)
    assert run("--config", str(config)).exit_code == 0
    assert given["models"] == first
    assert run("b=other", "--config", str(config)).exit_code == 0
    assert given["models"].models == {"b": "other", "org/c": "z"}  # the command line counts more
    assert given["models"].own_options == first.own_options


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models = 1", "models must be tables: [models.NAME]"),
        ("[models]\na = 1", "models must be tables: [models.NAME]"),
        ("[models.a]", 'models.a needs one model: model = "…"'),
        ('[models.a]\nmodel = ["x", "y"]', "models.a needs one model"),
        ('[models."a b"]\nmodel = "x"', "'a b' is no name for a model"),
        ('[models.a]\nmodel = "x"\nport = 1', "models.a.port is not an option of one of the models"),
        ('[models.a]\nmodel = "x"\nmax-num-seq = 1', "there is no option 'max-num-seq'; did you mean 'max-num-seqs'?"),
        ('[models.a]\nmodel = "x"\ndtype = "float"', "models.a.dtype: 'float' is not one of"),
        ('[models.a]\nmodel = "x"\nadapter = "fix"', "models.a.adapter: 'fix' is no adapter; give NAME=PATH"),
        ('model = "a=y"\n[models.a]\nmodel = ["x", "y"]\n[models.b]', "models.b needs one model"),
    ],
)
def test_wrong_tables_are_refused_by_name(given: dict[str, Any], tmp_path: Path, text: str, message: str) -> None:
    config = tmp_path / "serve.toml"
    config.write_text(text)
    result = run("--config", str(config))
    assert result.exit_code == 2
    assert message in result.output
    assert not given


def test_a_name_has_one_meaning() -> None:
    for own in ({"a": {"adapters": {"b": "x"}}}, {"a": {"adapters": {"f": "x"}}, "b": {"adapters": {"f": "y"}}}):
        with pytest.raises(ValueError, match="has the name of another model or adapter"):
            PoolSettings(models={"a": "x", "b": "y"}, own_options=own)
    with pytest.raises(ValueError, match="options of 'c', which is none of the models"):
        PoolSettings(models={"a": "x"}, own_options={"c": {}})


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
