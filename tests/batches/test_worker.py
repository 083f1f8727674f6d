"""Jobs finish despite failures of requests, the engine, the disk and the process."""

import asyncio
import gc
import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from inflight.batches import ledger, worker
from inflight.batches.batch import Batch
from inflight.batches.database import DatabaseInUseError
from inflight.batches.request_lines import Result
from inflight.contracts.api.errors import EngineGivenUpError
from tests.batches.jobs import Clock, Echo, Jobs, echo, error, requests


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path / "jobs")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits before it is tried again."""
    monkeypatch.setattr(worker, "SECONDS_BEFORE_RETRY", 0.0)


def numbered(prompts: list[Any]) -> list[tuple[str, Any]]:
    return [(str(number), prompt) for number, prompt in enumerate(prompts, 1)]


def test_results_come_in_the_order_of_the_lines(jobs: Jobs) -> None:
    prompts = [f"{'ab'[number % 2] * 100} {number}" for number in range(50)]
    batch, asker = jobs.create(requests(prompts)), Echo()
    jobs.finish(asker)
    now = jobs.get(batch)
    assert (now.status, now.num_lines, now.num_completed, now.num_failed) == ("completed", 50, 50, 0)
    assert (now.num_input_tokens, now.num_output_tokens) == (100, 150)
    assert list(now.reached) == ["in_progress", "finalizing", "completed"]
    assert jobs.results(batch) == numbered(prompts)
    assert now.error_file_id is None
    assert [prompt[0] for prompt in asker.asked] in (["a"] * 25 + ["b"] * 25, ["b"] * 25 + ["a"] * 25)
    file = jobs.files.get(now.output_file_id or "")
    assert file is not None
    assert (file.filename, file.purpose) == (f"{batch.id}_output.jsonl", "batch_output")


def test_refused_requests_are_errors_and_later_is_tried_again(jobs: Jobs) -> None:
    first = {"busy": error("queue_full", 429), "restarting": error("aborted")}

    def answers(prompt: str) -> Any:
        return error("no", 400) if prompt == "wrong" else first.pop(prompt, None)

    prompts = ["busy", "wrong", "restarting", "fine"]
    batch = jobs.create(requests(prompts))
    jobs.finish(Echo(answers))
    assert jobs.results(batch) == [("1", "busy"), ("3", "restarting"), ("4", "fine")]
    assert jobs.errors(batch) == [("2", 400)]
    assert jobs.get(batch).num_failed == 1


def test_a_request_that_kills_the_engine_twice_is_an_error_and_the_others_are_not(jobs: Jobs) -> None:
    alive, together = asyncio.Event(), list[str]()

    async def die_with_others(prompt: str) -> Any:
        """All requests run until the engine dies, and all fail with it."""
        if prompt == "deadly":
            alive.set()
            return error("engine_dead")
        if not alive.is_set():
            together.append(prompt)
            await alive.wait()
            return error("engine_dead")
        return None

    prompts = ["a", "b", "deadly", *"cdefgh"]
    batch = jobs.create(requests(prompts))
    asker = Echo(die_with_others)
    jobs.finish(asker, max_in_work=3)
    assert together == ["a", "b"]
    assert jobs.errors(batch) == [("3", "engine_died")]
    assert jobs.results(batch) == [each for each in numbered(prompts) if each[1] != "deadly"]
    assert [asker.asked.count(prompt) for prompt in prompts] == [2, 2, 2, 1, 1, 1, 1, 1, 1]


class GivenUp(Echo):
    """Does not come back after its first death."""

    async def wait_until_ready(self) -> None:
        if self.asked and self.answers(self.asked[-1]) is not None:
            raise EngineGivenUpError("it has died too often")


def test_an_engine_that_is_given_up_fails_no_request(jobs: Jobs) -> None:
    batch = jobs.create(requests("abcde"))
    with pytest.raises(EngineGivenUpError):
        jobs.finish(GivenUp(lambda _: error("engine_dead")), max_in_work=2)
    assert jobs.get(batch).status == "in_progress"
    jobs.finish(Echo())
    assert jobs.results(batch) == numbered(list("abcde"))


def test_a_cancelled_job_keeps_what_is_answered(jobs: Jobs) -> None:
    async def run() -> None:
        stuck, doing = asyncio.Event(), asyncio.Event()

        async def answers(prompt: int) -> Any:
            if prompt >= 5:
                doing.set()
                await stuck.wait()

        at_work = jobs.worker(Echo(answers), max_in_work=2)
        working = asyncio.create_task(at_work.work_on_next())
        await doing.wait()
        while jobs.get(batch).num_completed < 5:
            await asyncio.sleep(0)
        assert (await at_work.cancel(batch.id)).status == "cancelling"
        await working
        assert (await at_work.cancel(batch.id)).status == "cancelled"

    batch = jobs.create(requests(range(8)))
    asyncio.run(run())
    now = jobs.get(batch)
    assert (now.status, now.num_completed, now.num_failed) == ("cancelled", 5, 3)
    assert jobs.results(batch) == [(str(number + 1), number) for number in range(5)]
    assert jobs.errors(batch) == [(str(number), "batch_cancelled") for number in (6, 7, 8)]


def test_a_job_that_has_not_begun_can_be_cancelled(jobs: Jobs) -> None:
    batch = jobs.create(requests("abc"))
    asyncio.run(jobs.worker(Echo()).cancel(batch.id))
    jobs.finish(asker := Echo())
    assert jobs.get(batch).status == "cancelled"
    assert asker.asked == []


def test_a_job_expires_with_what_is_answered(tmp_path: Path) -> None:
    clock = Clock()
    jobs = Jobs(tmp_path / "jobs", clock)
    late, early = jobs.create(requests("abc"), seconds=10), jobs.create(requests("abc"), seconds=1000)
    clock.now += 10
    jobs.finish(Echo())
    assert jobs.get(late).status == "expired"
    assert jobs.errors(late) == [(number, "batch_expired") for number in "123"]
    assert jobs.get(early).status == "completed"


def test_requests_that_are_in_work_when_a_job_expires_are_given_up(tmp_path: Path) -> None:
    async def stuck(_: Any) -> Any:
        clock.now += 10_000
        await asyncio.Event().wait()

    clock = Clock()
    jobs = Jobs(tmp_path / "jobs", clock)
    batch = jobs.create(requests("ab"), seconds=1)
    jobs.finish(Echo(stuck))
    assert jobs.get(batch).status == "expired"
    assert jobs.errors(batch) == [("1", "batch_expired"), ("2", "batch_expired")]


def test_a_file_that_is_wrong_fails_at_once(jobs: Jobs) -> None:
    double = requests("ab") + requests("a") + b"{\n"
    contents = {b"": "empty_file", b"\n \n": "empty_file", b"no": "invalid_json_line", double: "duplicate_custom_id"}
    for content, code in contents.items():
        batch = jobs.create(content)
        jobs.finish(asker := Echo())
        now = jobs.get(batch)
        assert (now.status, now.errors[0].code) == ("failed", code)
        assert asker.asked == []
    assert [(each.code, each.line) for each in now.errors] == [("duplicate_custom_id", 3), ("invalid_json_line", 4)]
    many = jobs.create(b"no\n" * 1000)
    jobs.finish(Echo())
    assert len(jobs.get(many).errors) == worker.MAX_ERRORS


def test_a_job_whose_file_disappears_keeps_what_is_answered_and_stops_no_other(jobs: Jobs) -> None:
    batch, other = jobs.create(requests("abcd")), jobs.create(requests("x"))
    with pytest.raises(EngineGivenUpError):
        jobs.finish(GivenUp(lambda prompt: error("engine_dead") if prompt == "c" else None), max_in_work=1)
    num_answered = jobs.get(batch).num_completed
    jobs.files.path_of(batch.input_file_id).unlink()
    jobs.finish(Echo())
    assert jobs.get(batch).status == "cancelled"
    assert len(jobs.results(batch)) == num_answered > 0
    assert jobs.results(other) == [("1", "x")]


def test_a_full_disk_delays_a_job(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the disk is full, the error is raised, nothing is counted, and the job goes on later."""
    batch = jobs.create(requests(range(30)))
    with jobs.database.reading() as connection:
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
    num_failures = 0
    for extra in range(1, 40):
        with jobs.database.reading() as connection:
            connection.execute(f"PRAGMA max_page_count = {pages + extra}")
        try:
            jobs.finish(Echo(lambda prompt: (200, echo(f"{prompt}" * 300))))
        except sqlite3.OperationalError:
            num_failures += 1
        else:
            break
    assert num_failures > 3
    now = jobs.get(batch)
    assert (now.status, now.num_completed) == ("completed", 30)
    assert jobs.results(batch) == [(str(number + 1), f"{number}" * 300) for number in range(30)]


def test_a_worker_rests_after_a_failure_and_goes_on(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "SECONDS_AFTER_FAILURE", 0.0)
    batch, num_failures = jobs.create(requests("abc")), 0
    add = jobs.ledger.add_results

    def fail_twice(batch_id: str, results: list[Result]) -> Batch:
        nonlocal num_failures
        if num_failures < 2:
            num_failures += 1
            raise sqlite3.OperationalError("database or disk is full")
        return add(batch_id, results)

    monkeypatch.setattr(jobs.ledger, "add_results", fail_twice)

    async def run() -> None:
        working = asyncio.create_task(jobs.worker(Echo()).run())
        while not jobs.get(batch).is_finished:
            await asyncio.sleep(0.001)
        working.cancel()

    asyncio.run(run())
    assert num_failures == 2
    assert jobs.results(batch) == numbered(list("abc"))


def test_only_one_process_has_a_folder(jobs: Jobs, tmp_path: Path) -> None:
    with pytest.raises(DatabaseInUseError, match="another process works with the batch jobs in"):
        Jobs(tmp_path / "jobs")
    jobs.database.close()
    Jobs(tmp_path / "jobs").database.close()


def test_a_folder_that_is_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "batches.sqlite").write_bytes(b"not a database" * 1000)
    with pytest.raises(OSError, match="file is not a database"):
        Jobs(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="exists"):
        Jobs(tmp_path / "file")


def test_a_file_whose_time_is_up_goes_unless_a_job_needs_it(tmp_path: Path) -> None:
    clock = Clock()
    jobs = Jobs(tmp_path / "jobs", clock)
    ids = []
    for lifetime in (None, 100, 100):
        new = jobs.files.create()
        new.write(requests("ab"))
        ids.append(jobs.files.add(new, "", "name", "batch", lifetime).id)
    batch = jobs.ledger.create(ids[2], None, "1h", output_expires_after=50)
    clock.now += 100
    assert [file.id for file in jobs.files.all()] == [ids[0]]
    assert jobs.files.get(ids[1]) is None
    jobs.ledger.sweep()
    assert [jobs.files.path_of(each).exists() for each in ids] == [True, False, True]
    jobs.finish(Echo())
    assert jobs.results(batch) == numbered(list("ab"))
    clock.now += 50
    jobs.ledger.sweep()
    assert {path.name for path in (tmp_path / "jobs" / "files").iterdir()} == {ids[0]}


class Killed(Exception):
    """The process has ended."""


@pytest.mark.parametrize("seed", range(6))
def test_a_job_that_is_cut_short_anywhere_loses_nothing(jobs: Jobs, seed: int) -> None:
    """The process ends in the middle of any step, over and over: within transactions, before them, after them."""
    rng = random.Random(seed)
    folder, num_lines, max_in_work = jobs.database.folder, rng.randint(1, 60), rng.randint(1, 9)
    prompts = [f"{rng.choice('ab') * 100}{number}" for number in range(num_lines)]
    batch = jobs.create(requests(prompts))
    asked: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger, "PAGE_LINES", rng.choice([1, 3, 256]))
        patch.setattr(ledger, "ROWS_AT_ONCE", rng.choice([1, 4, 1000]))
        patch.setattr(worker, "LINES_AT_ONCE", rng.choice([1, 5, 4096]))
        for attempt in range(21):
            if attempt < 20:
                cut(patch, jobs, rng)
            asker, is_done = Echo(), True
            try:
                jobs.finish(asker, max_in_work=max_in_work)
            except Killed:
                is_done = False
            asked += asker.asked
            if is_done:
                break
            gc.collect()  # statements that the error held
            jobs.database.close()
            jobs = Jobs(folder)
    assert jobs.get(batch).status == "completed"
    assert jobs.results(batch) == numbered(prompts)
    assert set(asked) == set(prompts)
    jobs.ledger.sweep()
    with jobs.database.reading() as connection:
        assert connection.execute("SELECT count(*) FROM lines").fetchone() == (0,)
        assert connection.execute("SELECT count(*) FROM results").fetchone() == (0,)
    jobs.database.close()


def cut(patch: pytest.MonkeyPatch, jobs: Jobs, rng: random.Random) -> None:
    """End the process at a random statement: no later one is executed."""
    connection, num_left, just_did = jobs.database._connection, int(2 ** rng.uniform(0, 10)), rng.random() < 0.5

    class Connection:
        in_transaction = property(lambda _: connection.in_transaction)

        def __getattr__(self, name: str) -> Any:
            method = getattr(connection, name)
            if name not in ("execute", "executemany"):
                return method

            def run(*arguments: Any) -> Any:
                nonlocal num_left
                num_left -= 1
                if num_left > 0 or (num_left == 0 and just_did):
                    result = method(*arguments)
                if num_left <= 0:
                    raise Killed
                return result

            return run

    patch.setattr(jobs.database, "_connection", Connection())
