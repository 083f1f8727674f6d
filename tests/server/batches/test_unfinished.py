"""Unfinished jobs: beside ordinary requests, cancelled, and resumed by the next server."""

from pathlib import Path
from typing import Any

import openai
import pytest

from inflight.contracts.step.plan import StepPlan, StepTokens
from inflight.server.app import create_app
from inflight.server.operations.api_keys import ApiKeys
from inflight.server.serving.settings import ServerSettings
from tests.coroutines import run
from tests.server.batches.jobs import COMPLETION, begin, content_of, finished, long_lines, names_in, read, wait_for
from tests.server.operations.serving import serving
from tests.server.serving import RunningServer
from tests.stepper import Stepper


def run_until_some_are_answered(stepper: Stepper, server: RunningServer, job: Any) -> int:
    """Let the engine run until a job of `long_lines` has more results, but is not finished. Returns its number of
    results."""

    def num_completed() -> int:
        counts = server.client.batches.retrieve(job.id).request_counts
        return 0 if counts is None else counts.completed

    before = num_completed()
    stepper.allow(30)
    wait_for(lambda: num_completed() > before)
    stepper.wait_until_held()
    return num_completed()


def test_a_job_gets_no_tokens_while_a_client_is_served(stepper: Stepper, tmp_path: Path) -> None:
    with RunningServer(stepper.llm, batch_dir=str(tmp_path)) as server:
        job = begin(server.client, content_of(long_lines(8)))
        stepper.wait_until_held()
        (engine,) = stepper.engines
        kinds, inner = list[set[bool]](), stepper.run

        def record(plan: StepPlan, masks: Any) -> StepTokens:
            kinds.append({engine.scheduler.running(span.sequence_id).is_background for span in plan.spans})
            return inner(plan, masks)

        stepper.run = record  # type: ignore[method-assign]
        stepper.allow()
        server.complete(prompt=[9, 8, 7], max_tokens=12, ignore_eos=True)
        now = finished(server.client, job)
        assert (now.status, now.request_counts.completed) == ("completed", 8)
    for_client = [place for place, kind in enumerate(kinds) if kind == {False}]
    assert len(for_client) >= 12
    assert for_client == list(range(for_client[0], for_client[-1] + 1)), "no step of the job lies between"
    assert {True, False} not in kinds, "and none is shared"
    assert kinds[for_client[-1] + 1 :].count({True}) > 0, "the job goes on afterwards"


def test_a_cancelled_job_keeps_what_was_answered(stepper: Stepper, tmp_path: Path) -> None:
    with RunningServer(stepper.llm, batch_dir=str(tmp_path)) as server:
        client, lines = server.client, long_lines(30)
        job = begin(client, content_of(lines))
        run_until_some_are_answered(stepper, server, job)
        cancelled = client.batches.cancel(job.id)
        assert (cancelled.status, cancelled.cancelling_at is not None) == ("cancelling", True)
        assert client.batches.cancel(job.id).status in ("cancelling", "cancelled")
        stepper.allow()
        now = finished(client, job)
        assert (now.status, now.cancelled_at is not None, now.completed_at) == ("cancelled", True, None)
        done, given_up = read(client, now.output_file_id), read(client, now.error_file_id)
        counts = now.request_counts
        assert (counts.total, counts.completed, counts.failed) == (30, len(done), len(given_up))
        assert 0 < len(done) < 30
        assert {each["response"]["status_code"] for each in done} == {200}
        assert {each["response"]["body"]["usage"]["completion_tokens"] for each in done} == {20}
        assert {(each["error"]["code"], each["response"]) for each in given_up} == {("batch_cancelled", None)}
        order = [each["custom_id"] for each in lines]
        for some in (done, given_up):
            places = [order.index(each["custom_id"]) for each in some]
            assert places == sorted(places)
        assert sorted(each["custom_id"] for each in done + given_up) == sorted(order)
        assert client.batches.cancel(job.id) == now, "once more changes nothing"
        server.check_idle()


def test_a_job_that_waits_for_another_can_be_cancelled(stepper: Stepper, tmp_path: Path) -> None:
    with RunningServer(stepper.llm, batch_dir=str(tmp_path)) as server:
        first, second, third = (begin(server.client, content_of(long_lines(6))) for _ in range(3))
        stepper.wait_until_held()
        server.client.batches.cancel(second.id)
        stepper.allow()
        assert [finished(server.client, job).status for job in (first, second, third)] == [
            "completed",
            "cancelled",
            "completed",
        ]


def test_a_finished_job_cannot_be_cancelled(stepper: Stepper, tmp_path: Path) -> None:
    stepper.allow()
    with RunningServer(stepper.llm, batch_dir=str(tmp_path)) as server:
        for content, status in ((content_of(long_lines(1)), "completed"), (b"", "failed")):
            job = finished(server.client, begin(server.client, content))
            with pytest.raises(openai.ConflictError, match=f"is {status}; only a job that is not finished") as refused:
                server.client.batches.cancel(job.id)
            assert (refused.value.code, refused.value.param) == ("batch_finished", "batch_id")
            assert server.client.batches.retrieve(job.id) == job


def test_the_input_of_an_unfinished_job_cannot_be_deleted(stepper: Stepper, tmp_path: Path) -> None:
    with RunningServer(stepper.llm, batch_dir=str(tmp_path)) as server:
        job = begin(server.client, content_of(long_lines(3)))
        stepper.wait_until_held()
        with pytest.raises(openai.ConflictError, match="is the input of a batch job that is not finished") as refused:
            server.client.files.delete(job.input_file_id)
        assert refused.value.code == "file_in_use"
        assert job.input_file_id in names_in(tmp_path)
        stepper.allow()
        assert finished(server.client, job).request_counts.completed == 3
        assert server.client.files.delete(job.input_file_id).deleted


def test_the_next_servers_go_on_and_no_line_is_lost_or_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines, num_completed = long_lines(30), [0]
    for place in range(2):
        stepper = Stepper(monkeypatch, num_blocks=1000, max_num_seqs=4)
        with RunningServer(stepper.llm, batch_dir=str(tmp_path)) as server:
            if place == 0:
                job = begin(server.client, content_of(lines), metadata={"a": "b"})
                waiting = begin(server.client, content_of(long_lines(2)))
            num_completed.append(run_until_some_are_answered(stepper, server, job))
            server._server.should_exit = True
            wait_for(server.app.state.batch_jobs._working.done)
            stepper.allow()  # the engine can end, and its results are not read any more
    assert 0 < num_completed[1] < num_completed[2] < 30

    stepper = Stepper(monkeypatch, num_blocks=1000, max_num_seqs=4)
    stepper.allow()
    with RunningServer(stepper.llm, batch_dir=str(tmp_path)) as server:
        now, other = (finished(server.client, each) for each in (job, waiting))
        done = read(server.client, now.output_file_id)
        alone = [server.complete(**each["body"]) for each in lines]
        assert names_in(tmp_path) == sorted(file.id for file in server.client.files.list())
    assert (now.status, now.metadata, other.status) == ("completed", {"a": "b"}, "completed")
    assert (now.request_counts.total, now.request_counts.completed, now.error_file_id) == (30, 30, None)
    assert [each["custom_id"] for each in done] == [each["custom_id"] for each in lines]
    for each, answer in zip(done, alone, strict=True):
        assert each["response"]["body"]["choices"] == answer["choices"]
    assert now.usage.output_tokens == 30 * 20, "what was answered before an end is counted once"


def test_a_second_server_on_the_same_folder_is_refused(stepper: Stepper, tmp_path: Path) -> None:
    settings = ServerSettings(batch_dir=str(tmp_path))
    said = "the folder for batch jobs cannot be used: another process works with the batch jobs in"
    with RunningServer(stepper.llm, batch_dir=str(tmp_path)), pytest.raises(ValueError, match=said):
        create_app(stepper.llm, settings)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="the folder for batch jobs cannot be used"):
        create_app(stepper.llm, ServerSettings(batch_dir=str(tmp_path / "file")))


def test_another_key_sees_neither_files_nor_jobs(stepper: Stepper, tmp_path: Path) -> None:
    stepper.allow()
    served = create_app(stepper.llm, ServerSettings(batch_dir=str(tmp_path)))
    app = ApiKeys(["sk-one", "sk-two"]).middleware(served)

    async def check() -> None:
        async with serving(app) as url:
            one, two = (openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=f"sk-{name}") for name in ("one", "two"))
            file = await one.files.create(file=("a.jsonl", content_of(long_lines(2))), purpose="batch")
            begun: Any = {"input_file_id": file.id, "endpoint": COMPLETION, "completion_window": "24h"}
            with pytest.raises(openai.NotFoundError, match="there is no file"):
                await two.batches.create(**begun)
            job = await one.batches.create(**begun)
            while (now := await one.batches.retrieve(job.id)).status != "completed":
                assert now.status not in ("failed", "expired", "cancelled")
            assert now.output_file_id is not None
            for file_id in (file.id, now.output_file_id):
                assert (await one.files.retrieve(file_id)).id == file_id
                for hidden in (two.files.retrieve, two.files.content, two.files.delete):
                    with pytest.raises(openai.NotFoundError, match=f"there is no file '{file_id}'"):
                        await hidden(file_id)
            for secret in (two.batches.retrieve, two.batches.cancel):
                with pytest.raises(openai.NotFoundError, match=f"there is no batch job '{job.id}'"):
                    await secret(job.id)
            assert (await two.files.list()).data == (await two.batches.list()).data == []
            assert len((await one.files.list()).data) == 2
            assert [each.id for each in (await one.batches.list()).data] == [job.id]
            for hidden_list, after in ((two.files, file.id), (two.batches, job.id)):
                with pytest.raises(openai.BadRequestError, match="there is nothing with the id"):
                    await hidden_list.list(after=after)
            await one.close()
            await two.close()

    run(check())
