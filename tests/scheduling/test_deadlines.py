"""`Deadlines` reports requests in order of time, each once."""

from inflight.engine.reporting import Deadlines


def test_requests_are_due_once_after_their_deadline() -> None:
    deadlines = Deadlines()
    for request_id, time in (("late", 9.0), ("early", 1.0), ("middle", 5.0)):
        deadlines.add(request_id, time)
    assert deadlines.due(0.5) == []
    assert deadlines.due(5.0) == ["early", "middle"]
    assert deadlines.due(5.0) == []
    assert deadlines.due(100.0) == ["late"]
