"""The process whose writes are recorded: it runs a job in a folder, and marks the results that it considers durable."""

import os
import sys
from pathlib import Path

from inflight.batches.batch import Batch
from tests.batches.jobs import Echo, Jobs, requests

NUM_LINES = 60


def main() -> None:
    jobs = Jobs(Path(sys.argv[1]))

    def observe(batch: Batch) -> None:
        os.unlink(f"/mark/{batch.status} {batch.num_completed}")

    batch = jobs.create(requests(range(NUM_LINES)))
    os.unlink(f"/mark/created {batch.id}")
    jobs.finish(Echo(), max_in_work=5, observe=observe)
    jobs.database.close()


if __name__ == "__main__":
    main()
