"""The manifests in `examples/deploy/kubernetes` fit each other, the command and the server."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from inflight.cli.serve import serve
from inflight.contracts.api.watching import KVEvents
from inflight.server.endpoints import HEALTH_PATH

FOLDER = Path(__file__).parents[2] / "examples" / "deploy" / "kubernetes"
OF_IMAGE = ["--host", "0.0.0.0", "--port", "8000", "--log-format", "json"]


def manifests() -> dict[str, Any]:
    documents = [each for path in FOLDER.glob("*.yaml") for each in yaml.safe_load_all(path.read_text())]
    return {document["kind"]: document for document in documents}


@pytest.fixture
def pod() -> Any:
    return manifests()["Deployment"]["spec"]["template"]["spec"]


def test_the_command_takes_the_arguments(pod: Any) -> None:
    (container,) = pod["containers"]
    dockerfile = (FOLDER.parent / "Dockerfile").read_text()
    assert all(f'"{each}"' in dockerfile for each in OF_IMAGE)
    context = serve.make_context("serve", [*OF_IMAGE, *container["args"]])
    options = context.params
    assert options["model_argument"] == ("Qwen/Qwen3-0.6B",)
    assert options["grace_period"] < pod["terminationGracePeriodSeconds"]
    events = KVEvents.parse(options["kv_events_config"])
    assert events is not None
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"http": options["port"], "kv-events": 5557, "kv-replay": 5558}
    assert (events.endpoint, events.replay_endpoint) == ("tcp://*:5557", "tcp://*:5558")


def test_probes_ask_what_the_server_answers(pod: Any) -> None:
    (container,) = pod["containers"]
    assert container["readinessProbe"]["httpGet"] == {"path": HEALTH_PATH, "port": "http"}
    assert container["livenessProbe"]["httpGet"] == {"path": "/version", "port": "http"}
    assert container["resources"]["requests"] == container["resources"]["limits"]


def test_names_fit_each_other() -> None:
    found = manifests()
    scaled = found["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (scaled["kind"], scaled["name"]) == ("Deployment", found["Deployment"]["metadata"]["name"])
    pool = found["InferencePool"]["spec"]
    (labels,) = found["Kustomization"]["labels"]
    assert pool["selector"]["matchLabels"] == labels["pairs"]
    assert pool["targetPorts"] == [{"number": 8000}]
    (rule,) = found["HTTPRoute"]["spec"]["rules"]
    assert rule["backendRefs"][0]["name"] == found["InferencePool"]["metadata"]["name"]
    assert {FOLDER / name for name in found["Kustomization"]["resources"]} < set(FOLDER.glob("*.yaml"))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_builds_them() -> None:
    built = subprocess.run(["kubectl", "kustomize", str(FOLDER)], capture_output=True, text=True, check=True)
    documents = {each["kind"]: each for each in yaml.safe_load_all(built.stdout)}
    assert set(documents) == {"Deployment", "Service", "HorizontalPodAutoscaler"}
    deployment, service = documents["Deployment"]["spec"], documents["Service"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert labels == deployment["selector"]["matchLabels"] == service["selector"]
    (container,) = deployment["template"]["spec"]["containers"]
    assert container["image"] == "inflight:latest"
