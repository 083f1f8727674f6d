"""The Helm chart in `examples/deploy/helm` makes what the manifests in `kubernetes` are."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from inflight.cli.serve import serve
from inflight.contracts.api.watching import KVEvents
from tests.server import helm_chart
from tests.server.test_kubernetes import FOLDER as KUBERNETES
from tests.server.test_kubernetes import OF_IMAGE

CHART = KUBERNETES.parent / "helm"
needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")
NAME = "app.kubernetes.io/name"


@pytest.fixture(params=["by_ours", pytest.param("by_helm", marks=needs_helm)])
def rendered(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    def render(**values: Any) -> dict[str, Any]:
        return {each["kind"]: each for each in getattr(helm_chart, request.param)(CHART, values, tmp_path)}

    return render


def container_of(documents: dict[str, Any]) -> Any:
    (container,) = documents["Deployment"]["spec"]["template"]["spec"]["containers"]
    return container


def options_of(documents: dict[str, Any]) -> dict[str, Any]:
    return serve.make_context("serve", [*OF_IMAGE, *container_of(documents)["args"]]).params


def test_a_chart_without_values_is_a_deployment_and_its_service(rendered: Any) -> None:
    documents = rendered()
    assert set(documents) == {"Deployment", "Service"}
    deployment, service = documents["Deployment"]["spec"], documents["Service"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert labels == deployment["selector"]["matchLabels"] == service["selector"]
    assert deployment["replicas"] == 1
    pod, options = deployment["template"]["spec"], options_of(documents)
    assert options["model_argument"] == ("Qwen/Qwen3-0.6B",)
    assert options["replicas"] == "auto"
    assert options["tensor_parallel_size"] == 1
    assert options["kv_events_config"] is None
    assert options["grace_period"] < pod["terminationGracePeriodSeconds"]
    assert container_of(documents)["ports"] == [{"name": "http", "containerPort": options["port"]}]
    assert service["ports"] == [{"name": "http", "port": 80, "targetPort": "http"}]
    assert pod["volumes"] == [{"name": "cache", "emptyDir": {}}]


def test_values_reach_the_command(rendered: Any) -> None:
    documents = rendered(
        model="./a model",
        engines=2,
        tensorParallelSize=2,
        gracePeriod=100,
        extraArgs=["--dtype=bfloat16", "--max-num-seqs=32"],
        kvEvents=True,
        apiKeysSecret="",
        cacheClaim="models",
        image={"repository": "registry.local/inflight"},
        resources={"limits": {"cpu": "4"}},
    )
    options = options_of(documents)
    assert (options["model_argument"], options["dtype"], options["max_num_seqs"]) == (("./a model",), "bfloat16", 32)
    assert (options["replicas"], options["tensor_parallel_size"]) == (2, 2)
    events = KVEvents.parse(options["kv_events_config"])
    assert events is not None
    assert (events.endpoint, events.replay_endpoint) == ("tcp://*:5557", "tcp://*:5558")
    container, pod = container_of(documents), documents["Deployment"]["spec"]["template"]["spec"]
    assert {each["containerPort"] for each in container["ports"]} == {8000, 5557, 5558}
    assert [each["name"] for each in container["env"]] == ["POD_IP"]
    assert container["image"] == "registry.local/inflight:latest"
    assert container["resources"]["limits"]["cpu"] == "4"
    assert container["resources"]["requests"]["cpu"] == "8"
    assert pod["terminationGracePeriodSeconds"] == 115
    assert pod["volumes"] == [{"name": "cache", "persistentVolumeClaim": {"claimName": "models"}}]


def test_an_autoscaler_has_the_number_of_pods(rendered: Any) -> None:
    documents = rendered(autoscaling={"enabled": True, "maxReplicas": 3})
    spec = documents["HorizontalPodAutoscaler"]["spec"]
    assert "replicas" not in documents["Deployment"]["spec"]
    assert spec["scaleTargetRef"]["name"] == documents["Deployment"]["metadata"]["name"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (1, 3)


def test_the_chart_and_the_manifests_say_the_same(rendered: Any) -> None:
    """But for names, and for what the chart leaves open."""
    ours = rendered(kvEvents=True, autoscaling={"enabled": True})
    for file in ("deployment", "service", "autoscaler"):
        (document,) = yaml.safe_load_all((KUBERNETES / f"{file}.yaml").read_text())
        assert _without_names(document) == _without_names(ours[document["kind"]])


def _without_names(document: Any) -> Any:
    """A manifest without what kustomize adds, what a release is called, and options at their defaults."""
    spec = document["spec"]
    spec.pop("selector", None)
    spec.pop("type", None)
    for metadata in (document["metadata"], spec.get("template", {}).get("metadata", {})):
        metadata.pop("labels", None)
        metadata.pop("name", None)
    spec.get("scaleTargetRef", {}).pop("name", None)
    if "template" in spec:
        (container,) = spec["template"]["spec"]["containers"]
        container["image"] = container["image"].removesuffix(":latest")
        container["args"] = [each for each in container["args"] if each != "--tensor-parallel-size=1"]
    return document
