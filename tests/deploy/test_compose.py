"""The services of compose.yaml find each other, and the files that they are given."""

import json
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml

from inflight.cli.serve import serve
from tests.packaging.environments import ROOT
from tests.server.test_kubernetes import OF_IMAGE

DEPLOY = ROOT / "examples" / "deploy"
COMPOSE = shutil.which("docker-compose", path=sysconfig.get_path("scripts"))


def services(**variables: str) -> dict[str, Any]:
    """The services, as Docker Compose understands the file."""
    command = [str(COMPOSE), "--file", str(DEPLOY / "compose.yaml"), "config", "--format", "json"]
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | variables
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)["services"]
    return found


def yaml_of(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def mounts_of(service: Any) -> dict[str, Path]:
    """The files of this folder that it is given, by where it finds them."""
    return {each["target"]: Path(each["source"]) for each in service["volumes"] if each["type"] == "bind"}


@pytest.mark.parametrize("model", [None, "Qwen/Qwen3-0.6B"])
def test_the_command_takes_the_arguments(model: str | None) -> None:
    server = services(**({"MODEL": model} if model else {}))["inflight"]
    options = serve.make_context("serve", [*OF_IMAGE, *server["command"]]).params
    assert options["model_argument"] == (() if model is None else (model,))
    (minutes, seconds) = server["stop_grace_period"].removesuffix("s").split("m")
    assert options["grace_period"] < int(minutes) * 60 + int(seconds)
    assert [each["target"] for each in server["ports"]] == [options["port"]]
    build = server["build"]
    assert Path(build["context"]) == ROOT
    assert Path(build["context"], build["dockerfile"]) == DEPLOY / "Dockerfile"


def test_keys_reach_the_server_only_if_there_are_any() -> None:
    """It refuses to start with an empty variable."""
    assert services()["inflight"]["environment"] == {"INFLIGHT_API_KEYS": None}
    assert services(INFLIGHT_API_KEYS="sk-one")["inflight"]["environment"] == {"INFLIGHT_API_KEYS": "sk-one"}


def test_images_have_versions_and_ports_are_for_this_machine() -> None:
    for name, service in services().items():
        assert name == "inflight" or ":" in service["image"]
        assert {each["host_ip"] for each in service["ports"]} == {"127.0.0.1"}
        for source in mounts_of(service).values():
            assert source.is_file()
            assert source.is_relative_to(DEPLOY)


def test_prometheus_scrapes_the_server_and_has_its_rules() -> None:
    found = services()
    config = yaml_of(DEPLOY / "prometheus.yml")
    (job,) = config["scrape_configs"]
    (port,) = (each["target"] for each in found["inflight"]["ports"])
    assert job["static_configs"] == [{"targets": [f"inflight:{port}"]}]
    folder = Path("/etc/prometheus")
    assert mounts_of(found["prometheus"]) == {
        str(folder / "prometheus.yml"): DEPLOY / "prometheus.yml",
        **{str(folder / name): DEPLOY / name for name in config["rule_files"]},
    }
    assert f"--config.file={folder / 'prometheus.yml'}" in found["prometheus"]["command"]


def test_grafana_asks_prometheus_and_has_the_board() -> None:
    found = services()
    mounts = mounts_of(found["grafana"])
    provisioned = {Path(target).parent.name: yaml_of(path) for target, path in mounts.items() if path.suffix == ".yml"}
    assert set(provisioned) == {"datasources", "dashboards"}
    (source,) = provisioned["datasources"]["datasources"]
    (port,) = (each["target"] for each in found["prometheus"]["ports"])
    assert (source["type"], source["url"]) == ("prometheus", f"http://prometheus:{port}")
    assert source["jsonData"]["timeInterval"] == yaml_of(DEPLOY / "prometheus.yml")["global"]["scrape_interval"]
    (provider,) = provisioned["dashboards"]["providers"]
    board = found["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert str(Path(board).parent) == provider["options"]["path"]
    assert mounts[board] == DEPLOY / "grafana" / "inflight.json"
