"""A job continues after a power loss at any moment: counted results are present, and none is lost or duplicated."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.batches.jobs import Echo, Jobs
from tests.batches.power_loss import Disk, read_log, recorder
from tests.batches.recorded_job import NUM_LINES

NUM_LOSSES = 60


@pytest.mark.thorough
def test_a_job_survives_the_loss_of_power_at_any_moment(tmp_path: Path) -> None:
    root, log = tmp_path / "jobs", tmp_path / "log"
    root.mkdir()
    environment = os.environ | {
        "LD_PRELOAD": str(recorder(tmp_path)),
        "RECORD_ROOT": str(root),
        "RECORD_LOG": str(log),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    subprocess.run([sys.executable, "-m", "tests.batches.recorded_job", root], check=True, env=environment)
    operations = read_log(log)
    assert sum(operation.what == "s" for operation in operations) > NUM_LINES / 5
    rng = random.Random(1)
    begun = next(i for i, operation in enumerate(operations) if operation.path.startswith("created"))
    moments = sorted(rng.sample(range(len(operations) + 1), NUM_LOSSES))
    assert moments[0] < begun < moments[-1]
    disk, done, num_counted = Disk(root), 0, 0
    for number, moment in enumerate(moments):
        for operation in operations[done:moment]:
            disk.do(operation)
        done = moment
        left = tmp_path / f"left-{number}"
        disk.write_after_loss(rng, left)
        num_counted += check(left, disk.marks)
    assert num_counted > NUM_LINES


def check(left: Path, marks: list[str]) -> int:
    """Resume the job and finish it. Returns the number of results that were counted before."""
    jobs = Jobs(left)
    batches = jobs.ledger.all()
    assert len(batches) <= 1
    if not marks:  # it may have begun or not
        jobs.database.close()
        return 0
    (batch,) = batches
    assert marks[0] == f"created {batch.id}"
    statuses = [mark.split() for mark in marks[1:]]
    num_counted = int(statuses[-1][1]) if statuses else 0
    assert batch.num_completed >= num_counted
    echo = Echo()
    jobs.finish(echo)
    now = jobs.get(batch)
    assert (now.status, now.num_completed, now.num_failed) == ("completed", NUM_LINES, 0)
    assert jobs.results(batch) == [(str(number + 1), number) for number in range(NUM_LINES)]
    assert len(echo.asked) == NUM_LINES - batch.num_completed, "what was there was not answered again"
    jobs.database.close()
    return num_counted
