"""`follow`: the loop of ranks 1 and up, which run rank 0's plans."""

from contextlib import suppress

from inflight.engine.ranks.links import LoadShard, RankFailed, Ready, RunStep, StreamLink
from inflight.execution.model_runner import ModelRunner
from inflight.execution.ranks.rank import Rank
from inflight.host.garbage_collection import freeze_loaded_objects


def follow(part: LoadShard, link: StreamLink) -> bool:
    """Load a shard of a model and run steps until rank 0 ends. Returns whether nothing failed before that."""
    try:
        rank = Rank(part.number, part.size, part.place.file)
        rank.begin(0)
        runner = ModelRunner(part.model, part.config, rank)
        freeze_loaded_objects()
        link.send(Ready(runner.info))
        while isinstance(step := link.receive(), RunStep):
            rank.begin(step.number)
            try:
                runner.compute(step.plan)
            except Exception:
                if not rank.is_given_up:
                    raise
        return True
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        with suppress(OSError):  # rank 0 has ended, which may be the reason
            link.send(RankFailed(reason))
        return False
