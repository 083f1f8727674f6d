"""What Prometheus gets from a working, dying, loading or hanging engine, and for requests of every kind."""

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from inflight import AsyncLLM, EngineDeadError, SamplingParams
from inflight.batches.batch import Batch
from inflight.contracts.api.outputs import CompletionOutput, RequestMetrics, RequestOutput
from inflight.contracts.step.record import STEP_SIZES, EngineStats
from inflight.engine.engine import Engine
from inflight.server.models.load_scheduler import LoadScheduler
from inflight.server.models.metrics import Loads
from inflight.server.models.pool import ModelPool
from inflight.server.operations import metrics as metrics_module
from inflight.server.operations.engine_metrics import ReadStats
from inflight.server.operations.metrics import Metrics
from inflight.server.operations.settings import OperatorSettings
from inflight.server.operations.stack import Operations
from tests import zoo
from tests.coroutines import run
from tests.server.operations.serving import client_of
from tests.test_engine_process import INFO

BLOCK_STATES = ("used", "kept", "cached", "free")
SOURCES = ("local_cache_hit", "local_compute")

Samples = dict[str, float]

DASHBOARD = (
    *(
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
    ),
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:num_preemptions_total"),
    *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    *("vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket"),
    *("vllm:time_per_output_token_seconds_bucket", "vllm:request_time_per_output_token_seconds_bucket"),
    *("vllm:e2e_request_latency_seconds_bucket", "vllm:request_queue_time_seconds_sum"),
    *("vllm:request_prefill_time_seconds_sum", "vllm:request_decode_time_seconds_sum"),
    *("vllm:request_inference_time_seconds_sum", "vllm:request_prompt_tokens_bucket"),
    *("vllm:request_generation_tokens_bucket", "vllm:request_max_num_generation_tokens_sum"),
    *("vllm:request_params_n_bucket", "vllm:request_params_max_tokens_bucket"),
)
"""The queries of vLLM's own dashboards, each for a model by its name."""


def samples_of(text: str) -> Samples:
    """All samples by name and labels, without the model's name, which each of our metrics must have, and the first
    engine's number."""
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name", None) == "tiny" or sample.name.startswith("process_")
            if labels.get("engine") == "0":
                del labels["engine"]
            inner = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
            samples[f"{sample.name}{{{inner}}}" if inner else sample.name] = sample.value
    return samples


async def scrape(metrics: Metrics) -> Samples:
    return samples_of((await metrics.scrape()).decode())


def stats_of(num: int = 0, num_crashes: int = 0, num_running: int = 0) -> EngineStats:
    """Stats of an engine in which every count is `num`."""
    return EngineStats(num, num, num, num, num, num, num_running, 2, 25, 25, 50, num_crashes, num_blocks_kept=10)


Answers = dict[int, EngineStats | None]


def scripted(*answers: Answers | EngineStats) -> ReadStats:
    """Engines, or the only one, that give these answers in order."""
    script = iter(answers)

    async def read(seconds: float) -> Answers:
        answer = next(script)
        return {0: answer} if isinstance(answer, EngineStats) else answer

    return read


def output_of(*lengths: int) -> RequestOutput:
    outputs = [CompletionOutput(i, "", [7] * length, finish_reason="length") for i, length in enumerate(lengths)]
    times = RequestMetrics(10.0, 10.5, 11.0, 13.0, 13.0)
    return RequestOutput("a", None, [5] * 30, outputs, times, True)


def served(llm: AsyncLLM) -> tuple[Metrics, FastAPI]:
    """A server with one endpoint, which reports its requests to the metrics."""
    metrics = Metrics("tiny", llm.replica_stats, lambda: llm.num_crashes)
    app = FastAPI()
    app.add_route("/metrics", metrics.endpoint)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        fields = await request.json()
        params = SamplingParams(**fields)

        async def stream():  # type: ignore[no-untyped-def]
            metrics.started("a", params.n, params)
            output, reason = None, "error"
            try:
                async with aclosing(llm.stream("Once upon a time, there was a fox.", params)) as deltas:
                    async for delta in deltas:
                        metrics.produced("a", len(delta.token_ids), time.monotonic())
                        yield delta.text
                        output = delta.output
                reason = output.outputs[0].finish_reason
            except (asyncio.CancelledError, GeneratorExit):
                reason = "abort"
                raise
            finally:
                metrics.finished("a", output, reason)

        return StreamingResponse(stream())

    @app.get("/v1/models/{name}")
    async def model(name: str) -> Response:
        return PlainTextResponse(name)

    return metrics, app


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(in_process=True, num_blocks=200)
    yield llm
    asyncio.run(llm.stop())


def test_a_real_engine_reports_under_the_metric_names_of_vllm(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "SECONDS_FOR_ENGINE", 60.0)

    async def check() -> None:
        metrics, app = served(llm)
        async with client_of(metrics.middleware(app)) as client:

            async def complete(**fields: object) -> None:
                async with client.post(
                    "/v1/completions", json={"temperature": 0, "ignore_eos": True} | fields
                ) as answer:
                    await answer.read()

            await complete(max_tokens=20)
            await complete(max_tokens=20)  # its prompt is found in the cache
            await complete(max_tokens=5, n=3, temperature=1.0)
            async with client.post("/v1/completions", json={"max_tokens": 900, "ignore_eos": True}) as answer:
                await answer.content.readexactly(1)
                answer.close()
            stats = await llm.stats()
            while (await llm.stats()).num_running:
                pass
            async with client.get("/metrics") as answer:
                assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
                samples = samples_of(await answer.text())
        names = {re.sub("{.*", "", name) for name in samples}
        assert set(DASHBOARD) <= names
        assert samples["inflight:engine_up"] == 1
        assert samples["vllm:num_requests_running"] == samples["vllm:kv_cache_usage_perc"] == 0
        assert samples["vllm:prompt_tokens_total"] == samples["vllm:prefix_cache_queries_total"] > 0
        assert 0 < samples["vllm:prefix_cache_hits_total"] < samples["vllm:prompt_tokens_total"]
        by_source = [samples[f"vllm:prompt_tokens_by_source_total{{source={each}}}"] for each in SOURCES]
        assert by_source[0] == samples["vllm:prefix_cache_hits_total"]
        assert sum(by_source) == samples["vllm:prompt_tokens_total"]
        assert samples["vllm:request_num_preemptions_count"] == 3
        assert samples["vllm:generation_tokens_total"] >= stats.num_generated_tokens >= 55
        assert samples["vllm:request_success_total{finished_reason=length}"] == 3
        assert samples["vllm:request_success_total{finished_reason=abort}"] == 1
        assert samples["inflight:request_aborts_total{reason=abort}"] == 1
        assert samples["vllm:time_to_first_token_seconds_count"] == 4
        assert samples["vllm:e2e_request_latency_seconds_count"] == 4
        for name in ("queue_time_seconds", "prefill_time_seconds", "decode_time_seconds", "inference_time_seconds"):
            assert samples[f"vllm:request_{name}_count"] == 3
        assert samples["vllm:request_generation_tokens_sum"] == 55
        assert samples["vllm:request_max_num_generation_tokens_sum"] == 45
        assert samples["vllm:request_params_n_sum"] == 6
        assert samples["vllm:request_params_max_tokens_sum"] == 20 + 20 + 5 + 900
        inter_token = {name for name in samples if name.startswith("vllm:inter_token_latency_seconds_")}
        for name in inter_token:
            assert samples[name.replace("inter_token_latency", "time_per_output_token")] == samples[name]
        spent = samples["vllm:inter_token_latency_seconds_sum"] + samples["vllm:time_to_first_token_seconds_sum"]
        assert spent <= samples["vllm:e2e_request_latency_seconds_sum"]
        assert not metrics._running

    run(check())


def test_responses_are_counted_under_our_own_metric_names() -> None:
    async def check() -> None:
        metrics, app = served(AsyncLLM(zoo.build("gpt2"), in_process=True))
        async with client_of(metrics.middleware(app)) as client:
            for method, path in (
                *(("GET", f"/v1/models/{number}") for number in range(5)),
                ("GET", "/nowhere"),
                ("GET", "/elsewhere"),
                ("PROPFIND", "/nowhere"),
                ("POST", "/v1/completions"),
            ):
                headers = {"Connection": "close"}
                async with client.request(method, path, headers=headers) as answer:
                    await answer.read()
        counted = {name: value for name, value in (await scrape(metrics)).items() if "http_requests_total" in name}
        assert counted == {
            "inflight:http_requests_total{method=GET,path=/v1/models/{name},status=200}": 5,
            "inflight:http_requests_total{method=GET,path=other,status=404}": 2,
            "inflight:http_requests_total{method=other,path=other,status=404}": 1,
            "inflight:http_requests_total{method=POST,path=/v1/completions,status=500}": 1,
        }

    run(check())


def test_counters_never_decrease_when_the_engine_restarts() -> None:
    async def check() -> None:
        answers: tuple[Answers | EngineStats, ...] = (
            *(stats_of(10), stats_of(15), stats_of(15)),
            *({}, stats_of(20, num_crashes=2)),  # two engines died, and this one counted further
            *(stats_of(4, num_crashes=2), stats_of(6, num_crashes=2)),  # the engine was stopped and started again
        )
        crashes = iter((0, 0, 0, 1, 2, 2, 2))
        metrics = Metrics("tiny", scripted(*answers), lambda: next(crashes))
        names = ("vllm:prompt_tokens_total", "vllm:num_preemptions_total", "inflight:engine_steps_total")
        seen = []
        for _ in answers:
            samples = await scrape(metrics)
            assert len({samples[name] for name in names}) == 1
            seen.append((samples[names[0]], samples["inflight:engine_crashes_total"], samples["inflight:engine_up"]))
        assert seen == [(10, 0, 1), (15, 0, 1), (15, 0, 1), (15, 1, 0), (35, 2, 1), (39, 2, 1), (41, 2, 1)]

    run(check())


def test_an_engine_that_does_not_answer_keeps_its_gauges_and_one_that_does_not_run_has_none() -> None:
    async def check() -> None:
        metrics = Metrics("tiny", scripted(stats_of(10, num_running=3), {0: None}, {}))
        seen = [await scrape(metrics) for _ in range(3)]
        state = [
            (each["inflight:engine_up"], each["vllm:num_requests_running"], each["vllm:kv_cache_usage_perc"])
            for each in seen
        ]
        assert state == [(1, 3, 0.25), (0, 3, 0.25), (0, 0, 0)]
        blocks = [[each[f"inflight:cache_blocks{{state={state}}}"] for state in BLOCK_STATES] for each in seen]
        assert blocks == [[25, 10, 15, 50], [25, 10, 15, 50], [0, 0, 0, 0]]
        assert {each["vllm:prompt_tokens_total"] for each in seen} == {10}

    run(check())


def test_each_engine_has_its_own_numbers() -> None:
    async def check() -> None:
        answers: tuple[Answers, ...] = ({0: stats_of(10)}, {0: stats_of(10), 1: stats_of(4)}, {1: stats_of(5)})
        metrics = Metrics("tiny", scripted(*answers))
        seen = [await scrape(metrics) for _ in answers]
        for name in ("vllm:prompt_tokens_total", "vllm:prompt_tokens_by_source_total{source=local_cache_hit}"):
            of_second = name.replace("{", "{engine=1,") if "{" in name else f"{name}{{engine=1}}"
            assert [each[name] for each in seen] == [10, 10, 10]
            assert [each.get(of_second) for each in seen] == [None, 4, 5]
        ups = [(each["inflight:engine_up"], each.get("inflight:engine_up{engine=1}")) for each in seen]
        assert ups == [(1, None), (1, 1), (0, 1)]

    run(check())


def test_concurrent_scrapes_count_nothing_twice() -> None:
    async def check() -> None:
        num = 0

        async def read(seconds: float) -> Answers:
            nonlocal num
            num += 1
            mine = num
            for _ in range(10 - num):  # the first scrape gets the last answer
                await asyncio.sleep(0)
            return {0: stats_of(mine)}

        metrics = Metrics("tiny", read)
        await asyncio.gather(*(metrics.scrape() for _ in range(8)))
        assert (await scrape(metrics))["vllm:prompt_tokens_total"] == 9

    run(check())


def test_an_engine_failure_shows_in_the_metrics_and_the_engine_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    may_start, engines = threading.Event(), []

    def make(*args: Any) -> Engine:
        assert may_start.wait(60)
        engines.append(Engine(*args))
        return engines[-1]

    def broken() -> None:
        raise KeyError("lost")

    monkeypatch.setattr("inflight.engine.engine.Engine", make)
    monkeypatch.setattr(metrics_module, "SECONDS_FOR_ENGINE", 60.0)

    async def check() -> None:
        llm = AsyncLLM(in_process=True, restart_delays=(0.0,), num_blocks=200)
        metrics, app = served(llm)
        async with client_of(app) as client:

            async def complete() -> None:
                async with client.post("/v1/completions", json={"max_tokens": 5, "ignore_eos": True}) as answer:
                    await answer.read()

            may_start.set()
            await complete()
            before = await scrape(metrics)
            may_start.clear()
            engines[0].scheduler.plan = broken  # type: ignore[method-assign, assignment]
            with pytest.raises(EngineDeadError):
                await anext(llm.stream("a"))
            monkeypatch.setattr(metrics_module, "SECONDS_FOR_ENGINE", 0.05)
            samples = await scrape(metrics)
            assert samples["inflight:engine_up"] == 0
            assert samples["vllm:generation_tokens_total"] == before["vllm:generation_tokens_total"] == 5
            monkeypatch.setattr(metrics_module, "SECONDS_FOR_ENGINE", 60.0)
            may_start.set()
            await complete()
            after = await scrape(metrics)
            assert after["inflight:engine_up"] == after["inflight:engine_crashes_total"] == 1
            assert after["vllm:generation_tokens_total"] == 10
        await llm.stop()

    run(check())


@pytest.mark.parametrize(
    ("reason", "finished_reason"),
    [
        ("stop", "stop"),
        ("length", "length"),
        ("abort", "abort"),
        ("timeout", "abort"),
        ("error", "error"),
        ("refused", None),
    ],
)
def test_each_finish_reason_is_counted_once(reason: str, finished_reason: str | None) -> None:
    async def check() -> None:
        metrics = Metrics("tiny", scripted(stats_of()))
        metrics.started("a", 1, SamplingParams())
        metrics.finished("a", None, reason)
        metrics.finished("unknown", None, "stop")
        metrics.produced("unknown", 3, 1.0)
        samples = await scrape(metrics)
        ends = {name: value for name, value in samples.items() if name.startswith("vllm:request_success_total")}
        expected = dict.fromkeys(ends, 0.0)
        if finished_reason is not None:
            expected[f"vllm:request_success_total{{finished_reason={finished_reason}}}"] = 1.0
        assert len(ends) == 4
        assert ends == expected
        aborts = {name: value for name, value in samples.items() if name.startswith("inflight:request_aborts_total")}
        is_whole = reason in ("stop", "length")
        assert aborts == ({} if is_whole else {f"inflight:request_aborts_total{{reason={reason}}}": 1.0})
        assert samples["vllm:e2e_request_latency_seconds_count"] == (reason != "refused")

    run(check())


@pytest.mark.parametrize(
    ("num_sequences", "produced", "gaps"),
    [
        (1, [(1, 1.0), (1, 1.5), (1, 1.75)], [0.5, 0.25]),
        (1, [(1, 1.0), (4, 3.0)], [0.5, 0.5, 0.5, 0.5]),  # four tokens at once, because the reader was slow
        (1, [(5, 1.0), (0, 2.0), (1, 3.0)], [2.0]),
        (2, [(1, 1.0), (1, 1.0), (1, 2.0), (1, 2.0), (1, 4.0), (1, 4.0)], [1.0, 2.0]),
        (2, [(2, 1.0), (2, 2.0), (4, 4.0)], [1.0, 1.0, 1.0]),
    ],
)
def test_gaps_between_tokens_are_measured_per_sequence(
    num_sequences: int, produced: list[tuple[int, float]], gaps: list[float]
) -> None:
    async def check() -> None:
        metrics = Metrics("tiny", scripted(stats_of()))
        start = time.monotonic()
        metrics.started("a", num_sequences, SamplingParams(n=num_sequences))
        for num_new_tokens, seconds in produced:
            metrics.produced("a", num_new_tokens, start + seconds)
        samples = await scrape(metrics)
        assert samples["vllm:time_to_first_token_seconds_count"] == 1
        assert samples["vllm:time_to_first_token_seconds_sum"] == pytest.approx(1.0, abs=0.1)
        assert samples["vllm:inter_token_latency_seconds_count"] == len(gaps)
        assert samples["vllm:inter_token_latency_seconds_sum"] == pytest.approx(sum(gaps))

    run(check())


def test_times_and_sizes_match_the_output() -> None:
    async def check() -> None:
        metrics = Metrics("tiny", scripted(stats_of()))
        metrics.started("a", 2, SamplingParams(n=2, max_tokens=None))
        metrics.finished("a", output_of(5, 3), "length")
        metrics.started("b", 1, SamplingParams(max_tokens=7))
        never = output_of(0)
        never.metrics = replace(never.metrics, first_scheduled_time=None, first_token_time=None, last_token_time=None)
        metrics.finished("b", never, "abort")
        samples = await scrape(metrics)
        sums = {name.removesuffix("_sum"): value for name, value in samples.items() if name.endswith("_sum")}
        sums.pop("vllm:e2e_request_latency_seconds")
        assert {name: value for name, value in sums.items() if value} == {
            "vllm:request_queue_time_seconds": 0.5,
            "vllm:request_prefill_time_seconds": 0.5,
            "vllm:request_decode_time_seconds": 2.0,
            "vllm:request_inference_time_seconds": 2.5,
            "vllm:request_time_per_output_token_seconds": 0.5,
            "vllm:request_prompt_tokens": 60,
            "vllm:request_generation_tokens": 8,
            "vllm:request_max_num_generation_tokens": 5,
            "vllm:request_params_n": 3,
            "vllm:request_params_max_tokens": 7,
        }

    run(check())


def test_the_metrics_answer_any_accept_header() -> None:
    async def check() -> None:
        metrics, app = served(AsyncLLM(zoo.build("gpt2"), in_process=True, max_model_len=10**6))  # cannot be loaded
        async with client_of(metrics.middleware(app)) as client:
            for accept in (
                "*/*",
                "application/openmetrics-text;version=1.0.0;escaping=dots",
                "image/png",
                "\u00e9,;=,",
            ):
                async with client.get("/metrics", headers={"Accept": accept}) as answer:
                    assert answer.status == 200
                    assert samples_of(await answer.text())["inflight:engine_up"] == 0

    run(check())


def test_the_manual_lists_exactly_the_exported_metrics() -> None:
    manual = (Path(__file__).parents[3] / "docs" / "operating.md").read_text(encoding="utf-8")
    table = [line for line in manual.splitlines() if re.match(r"\| `(vllm|inflight):", line)]
    told = {name for line in table for name in re.findall(r"`((?:vllm|inflight):\w+)`", line.split("|")[1])}

    async def check() -> None:
        metrics = Metrics("tiny", scripted(stats_of()))
        metrics.engines.describe_cache(INFO, 2)
        metrics.describe_adapters(64)
        text = (await metrics.scrape()).decode()
        several = generate_latest(Loads(ModelPool({}, LoadScheduler({}, 1)))).decode()
        families = list(text_string_to_metric_families(text + several))
        names = {each.name + ("_total" if each.type == "counter" else "") for each in families}
        ours = {name for name in names if not name.endswith("_created") and not name.startswith("process_")}
        assert told == ours

    run(check())


def test_the_tokens_of_steps_are_a_histogram_across_restarts() -> None:
    def stats(num_crashes: int, tokens: int, **steps: int) -> EngineStats:
        counts = [steps.get(f"up_to_{size}", 0) for size in STEP_SIZES] + [steps.get("beyond", 0)]
        return replace(stats_of(3, num_crashes), num_step_tokens=tokens, num_steps_by_size=tuple(counts))

    metrics = Metrics("tiny", scripted(stats(0, 9, up_to_1=2, up_to_8=1), stats(1, 20_001, up_to_1=1, beyond=1)))

    async def check() -> None:
        await scrape(metrics)
        samples = await scrape(metrics)
        of = "vllm:iteration_tokens_total"
        found = {bound: samples[f"{of}_bucket{{le={bound}}}"] for bound in ("1.0", "8.0", "16384.0", "+Inf")}
        assert found == {"1.0": 3, "8.0": 4, "16384.0": 4, "+Inf": 5}
        assert (samples[f"{of}_sum"], samples[f"{of}_count"]) == (20_010, 5)

    asyncio.run(check())


def test_what_is_answered_of_a_batch_job_is_counted_once_and_not_what_an_earlier_server_answered() -> None:
    operations = Operations(OperatorSettings(), "tiny", scripted(stats_of(), stats_of()))
    job = Batch(
        id="a", owner="", input_file_id="f", endpoint=None, completion_window="", created_at=0, status="in_progress"
    )

    def samples_after(**changed: Any) -> list[float]:
        operations.batch_changed(replace(job, num_lines=9, **changed))
        samples = asyncio.run(scrape(operations.metrics))
        of = "inflight:batch_requests"
        names = (f"{of}_left", f"{of}_total{{outcome=completed}}", f"{of}_total{{outcome=failed}}")
        return [samples[name] for name in names]

    operations.batch_changed(replace(job, num_lines=9, num_completed=3))
    assert samples_after(num_completed=5, num_failed=1) == [3, 2, 1]
    assert samples_after(num_completed=5, num_failed=4, status="finalizing") == [0, 2, 1]
