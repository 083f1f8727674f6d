"""What Ray Serve is told of an application before anything runs: options, scaling, and what a request begins with."""

import json
from collections.abc import MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

pytest.importorskip("ray", reason="the extra 'ray' is not installed")

from ray.serve.schema import ServeDeploySchema

from inflight.contracts.step.record import EngineStats
from inflight.scale.prefix_front import ForwardedRequest
from inflight.scale.replica import POLICY, TARGET_LOAD, replicas_wanted, reported
from inflight.scale.serve import build_app
from inflight.scale.settings import AppSettings
from inflight.server.batches.answering import answered
from tests.coroutines import run

EXAMPLE = Path(__file__).parents[2] / "examples" / "deploy" / "ray-serve.yaml"


def test_the_example_is_an_application() -> None:
    content = yaml.safe_load(EXAMPLE.read_text())
    (application,) = ServeDeploySchema(**content).applications
    assert application.import_path == "inflight.scale.serve:build_app"
    deployment = build_app(application.args)._bound_deployment
    assert deployment.ray_actor_options["num_cpus"] == 16
    assert deployment._deployment_config.autoscaling_config.max_replicas == 8
    assert deployment._deployment_config.autoscaling_config.policy.policy_function == POLICY
    assert deployment._deployment_config.max_ongoing_requests == 128
    assert deployment._deployment_config.graceful_shutdown_timeout_s == 120


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modl": "gpt2"}, "modl"),
        ({"engine": {"max_num_seq": 3}}, "did you mean 'max_num_seqs'"),
        ({"server": {"max_m": 3}}, "max_m"),
        ({"server": {"batch_dir": "jobs"}}, "batch_dir is not an option on Ray"),
        ({"operator": {"log_format": "json"}}, "log_format is not an option on Ray"),
        ({"deployment": {"num_replica": 2}}, "did you mean 'num_replicas'"),
        ({"operator": {"grace_period": -1}}, "grace_period is -1"),
        ({"routing": "random"}, "routing is 'random'"),
    ],
)
def test_wrong_settings_are_told_before_anything_starts(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_app(settings)


def test_names_are_those_of_inflight_serve(tmp_path: Path) -> None:
    settings = AppSettings(model=str(tmp_path), served_model_names=("stories",)).server_settings()
    assert settings.model_name == "stories"
    assert settings.model_aliases == (tmp_path.name, str(tmp_path))


# ------------------------------------------------------------------------------------------------- scaling


def stats(num_running: int, num_waiting: int, num_used: int = 0) -> EngineStats:
    return EngineStats(*[0] * 6, num_running, num_waiting, num_used, 10, 990 - num_used)


@pytest.mark.parametrize(
    ("engines", "num_queued", "load"),
    [
        ([(0, 0)], 0, 0.0),
        ([(32, 0, 100)], 0, 0.5),
        ([(0, 64)], 0, 1.0),  # they have only just come
        ([(1, 63, 10)], 0, 1.0),
        ([(64, 64, 500)], 0, 2.0),  # all slots are taken
        ([(10, 30, 1000)], 0, 4.0),  # the cache has no room for more than ten
        ([(10, 30, 500)], 0, 2.0),
        ([(64, 0, 500), (0, 0)], 0, 1.0),
        ([(64, 0, 500), (64, 0, 500)], 128, 4.0),  # what waits at the proxies
    ],
)
@pytest.mark.parametrize("num_silent", [0, 2])
def test_replicas_follow_what_engines_have_to_do(
    engines: list[tuple[int, ...]], num_queued: int, load: float, num_silent: int
) -> None:
    reports = [reported(stats(*each), max_num_seqs=64) for each in engines]
    by_name = {name: {number: each[name] for number, each in enumerate(reports)} for name in ("load", "slots")}
    context = SimpleNamespace(
        aggregated_metrics=by_name,
        running_replicas=range(len(engines) + num_silent),
        total_queued_requests=num_queued,
        target_num_replicas=1,
    )
    wanted, state = replicas_wanted(context)  # type: ignore[arg-type]
    silent_load = num_silent * sum(by_name["load"].values()) / len(engines)
    assert wanted == pytest.approx((load + silent_load) / TARGET_LOAD)
    assert state == {}


def test_without_reports_there_stay_as_many_as_there_are() -> None:
    context = SimpleNamespace(aggregated_metrics=None, total_queued_requests=100, target_num_replicas=3)
    assert replicas_wanted(context) == (3, {})  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- forwarding


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"model": "m", "prompt": "Once", "max_tokens": 3}, '"Once"'),
        ({"max_tokens": 3, "messages": [{"role": "user"}]}, '[{"role":"user"}]'),
        ({"messages": [], "system": "Be brief.", "tools": [1]}, '[1]"Be brief."[]'),
        ({"input": "Hi", "instructions": "Be brief."}, '"Be brief.""Hi"'),
        ({"prompt": [5, 6, 7]}, "[5,6,7]"),
        (["no request"], "/v1/completions"),
        ({}, "/v1/completions"),
    ],
)
def test_routers_see_what_a_prompt_begins_with(body: Any, prompt: str) -> None:
    raw = json.dumps(body, separators=(",", ":")).encode()
    parts = iter([(raw[:5], True), (raw[5:], False)])

    async def receive() -> MutableMapping[str, Any]:
        part, is_more = next(parts)
        return {"type": "http.request", "body": part, "more_body": is_more}

    async def work() -> None:
        scope = {"type": "http", "path": "/v1/completions", "headers": [], "app": object()}
        request = await ForwardedRequest.receive(scope, receive)
        assert request is not None
        assert (request.body, request.prompt) == (raw, prompt)
        assert "app" not in request.scope

    run(work())


def test_an_abandoned_answer_is_aborted() -> None:
    ends: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"{}"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            await receive()
        finally:
            ends.append("given up")

    async def work() -> None:
        answer = answered(app, {"type": "http"}, b"{}")
        assert [each["type"] for each in await anext(answer)] == ["http.response.start"]
        await answer.aclose()
        assert ends == ["given up"]

    run(work())


def test_an_application_that_fails_fails_its_answer() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("no answer")

    async def work() -> None:
        with pytest.raises(RuntimeError, match="no answer"):
            await anext(answered(app, {"type": "http"}, b"{}"))

    run(work())
