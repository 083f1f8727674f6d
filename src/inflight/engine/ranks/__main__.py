"""The process of a rank that is not the first: it computes what rank 0 tells it to, and ends with rank 0."""

import os
import sys
import threading

from inflight.engine.python_process import take_over_standard_streams
from inflight.engine.ranks.messages import Failed, Message, Part, Prepared, Step, read_message, to_frame
from inflight.garbage_collection import end_without_garbage_collection, garbage_collection_paused, spare_what_stays


def main() -> int:
    incoming, outgoing = take_over_standard_streams()
    with garbage_collection_paused():  # this takes long, and what to load may not be known yet
        from inflight.execution.model_runner import ModelRunner
        from inflight.execution.ranks.rank import Rank
    part = read_message(incoming)
    if not isinstance(part, Part):
        return 0
    os.sched_setaffinity(0, part.cpus)  # before threads compute: each takes over what its maker may use
    threading.Thread(target=_end_with, args=(part.lifeline,), daemon=True).start()

    def send(message: Message) -> None:
        outgoing.write(to_frame(message))
        outgoing.flush()

    try:
        rank = Rank(part.number, part.size, part.file)
        rank.begin(0)
        runner = ModelRunner(part.model, part.config, rank)
        spare_what_stays()
        send(Prepared(runner.info))
        while isinstance(step := read_message(incoming), Step):
            rank.begin(step.number)
            try:
                runner.compute(step.plan)
            except Exception:
                if not rank.is_given_up:
                    raise
        return 0
    except Exception as error:
        send(Failed(str(error).partition("\n")[0]))
        return 1
    finally:
        end_without_garbage_collection()


def _end_with(lifeline: int) -> None:
    """End this process, whatever it is doing, when rank 0 does."""
    os.read(lifeline, 1)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
