"""`build_app`: a Ray Serve application that serves a model with OpenAI's API from several replicas.

    from ray import serve
    from inflight.scale.serve import build_app

    serve.run(build_app({"model": "Qwen/Qwen3-0.6B", "deployment": {"num_replicas": 2}}))

In a configuration file it is `import_path: inflight.scale.serve:build_app`, with the same under `args`.
"""

from collections.abc import Mapping
from inspect import signature
from typing import Any

from ray import serve
from ray.serve import Application

from inflight.contracts.api.options import refuse_unknown_options
from inflight.host.machine import usable_cores
from inflight.scale.prefix_front import PrefixFront, router_of
from inflight.scale.replica import POLICY, AnsweringReplica, EngineReplica
from inflight.scale.settings import PREFIX, AppSettings

REQUESTS_FOR_EACH_SLOT = 2
"""Requests per slot sent to a replica, so that the next ones are tokenized when a slot is freed. Others wait at Serve's
proxies, available to new replicas."""

MOST_STARTS = 3
"""Failed starts of replicas after which Serve gives up a deployment."""

FRONT: dict[str, Any] = {"name": "front", "max_ongoing_requests": 10_000, "ray_actor_options": {"num_cpus": 0}}


def build_app(settings: AppSettings | Mapping[str, Any]) -> Application:
    """Return the application. Raises `ValueError` for wrong settings."""
    settings = AppSettings.model_validate(settings)
    deployment = serve.deployment(**_deployment(settings))
    if settings.routing != PREFIX:
        return deployment(serve.ingress()(EngineReplica)).bind(settings)
    front = serve.deployment(**FRONT)(serve.ingress()(PrefixFront))
    return front.bind(deployment(AnsweringReplica).bind(settings), settings.operator_settings().max_body_size)


def _deployment(settings: AppSettings) -> dict[str, Any]:
    """The deployment's options: the given ones over defaults for an engine."""
    given = dict(settings.deployment)
    refuse_unknown_options(given, signature(serve.deployment).parameters, "the application's deployment")
    options: dict[str, Any] = {
        "name": "inflight",
        "max_ongoing_requests": REQUESTS_FOR_EACH_SLOT * settings.engine_config().scheduling.max_num_seqs,
        "max_constructor_retry_count": MOST_STARTS,
        "graceful_shutdown_timeout_s": settings.operator_settings().grace_period,
    }
    if given.get("num_replicas") == "auto":
        given |= {"num_replicas": None, "autoscaling_config": given.get("autoscaling_config") or {"max_replicas": 100}}
    if settings.routing == PREFIX:
        options["request_router_config"] = router_of(settings.engine_config().scheduling.max_num_seqs)
    scaling = given.get("autoscaling_config")
    if scaling is not None:
        given["autoscaling_config"] = {"policy": {"policy_function": POLICY}} | dict(scaling)
    actor = {"num_cpus": usable_cores()} | dict(given.pop("ray_actor_options", {}))
    return options | given | {"ray_actor_options": actor}
