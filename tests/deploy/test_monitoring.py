"""The dashboard, the alerts and the documents use only metrics that `/metrics` exposes."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.exposed import exposed
from tests.deploy.promql import Exposed, names_in, selected_by
from tests.packaging.environments import ROOT

DEPLOY = ROOT / "examples" / "deploy"
BOARD = json.loads((DEPLOY / "grafana" / "inflight.json").read_text())
PANELS = [each for each in BOARD["panels"] if each["type"] != "row"]
PROMTOOL = shutil.which("promtool")
OF_GRAFANA = {"$__rate_interval": "1m", "$model": ".*", "$instance": ".*"}


@pytest.fixture(scope="module")
def metrics() -> Exposed:
    return exposed()


def expressions_of(panel: Any) -> list[str]:
    """A panel's expressions, with values for the board's variables."""
    return [re.sub(r"\$\w+", lambda name: OF_GRAFANA[name[0]], each["expr"]) for each in panel["targets"]]


def alerts() -> list[Any]:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    return list(group["rules"])


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_asks_for_what_is_there(panel: Any, metrics: Exposed) -> None:
    for target, expression in zip(panel["targets"], expressions_of(panel), strict=True):
        shown = set(re.findall(r"{{\s*(\w+)\s*}}", target["legendFormat"]))
        labels = metrics.labels_of(expression)
        assert shown <= labels
        if shown:  # then the legend tells its series apart
            assert shown >= labels - {"job", "model_name"}


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_has_the_unit_of_what_it_shows(panel: Any) -> None:
    for expression in expressions_of(panel):
        (name, *others) = sorted(selected_by(expression))
        if name.endswith("_seconds_bucket"):
            unit = "s"
        elif others or name.endswith("_perc"):
            unit = "percentunit"
        elif "rate(" in expression and "request" in name:
            unit = "reqps" if "histogram_quantile" not in expression else "short"
        else:
            unit = "short"
        asked = panel["options"]["yAxis"] if panel["type"] == "heatmap" else panel["fieldConfig"]["defaults"]
        assert asked["unit"] == unit
        assert unit != "percentunit" or (asked["min"], asked["max"]) == (0, 1)


def test_the_board_is_whole() -> None:
    assert len({each["id"] for each in BOARD["panels"]}) == len(BOARD["panels"])
    assert len({each["title"] for each in BOARD["panels"]}) == len(BOARD["panels"])
    assert all(each["title"] and each["description"] for each in PANELS)
    taken: set[tuple[int, int]] = set()
    for place in (each["gridPos"] for each in BOARD["panels"]):
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        assert all(x < 24 for x, _ in cells)
        taken |= cells
    for panel in PANELS:
        refs = [each["refId"] for each in panel["targets"]]
        assert len(set(refs)) == len(refs)


def test_the_board_has_one_source_and_the_variables_that_it_names(metrics: Exposed) -> None:
    variables = {each["name"]: each for each in BOARD["templating"]["list"]}
    text = json.dumps(BOARD)
    assert set(re.findall(r"\$\{?(\w+)", text)) - {"__all"} == set(variables) | {"__rate_interval"}
    sources = [each["datasource"] for each in (*PANELS, *variables.values()) if "datasource" in each]
    assert sources == [{"type": "prometheus", "uid": "${datasource}"}] * (len(PANELS) + 2)
    for name in ("model", "instance"):
        query = variables[name]["query"]["query"].replace("$model", ".*")
        match = re.fullmatch(r"label_values\((.*), (\w+)\)", query)
        assert match is not None
        assert match[2] in metrics.labels_of(match[1])


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_an_alert_asks_for_what_is_there(alert: Any, metrics: Exposed) -> None:
    labels = metrics.labels_of(alert["expr"])
    assert set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"])) <= labels


def test_documents_and_manifests_name_metrics_that_are_there(metrics: Exposed) -> None:
    texts = [path.read_text() for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"), *DEPLOY.rglob("*.y*ml"))]
    assert names_in(texts) <= metrics.families | set(metrics.series)
    for text in texts:
        for expression in re.findall(r"`(rate\([^`]*)`", text):
            metrics.labels_of(" ".join(expression.split()))


def test_every_metric_is_in_the_manual(metrics: Exposed) -> None:
    told = names_in([(ROOT / "docs" / "operating.md").read_text()])
    ours = {name for name in metrics.families if not name.startswith("process_") and not name.endswith("_created")}
    assert {name for name in ours if not {name, f"{name}_total"} & told} == set()


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
@pytest.mark.parametrize(("kind", "file"), [("config", "prometheus.yml"), ("rules", "alerts.yml")])
def test_prometheus_takes_its_files(kind: str, file: str) -> None:
    command: list[str | Path] = [str(PROMTOOL), "check", kind, DEPLOY / file]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
