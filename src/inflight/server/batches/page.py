"""`page_of`: a list of objects, a page at a time, as OpenAI's API gives it."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from inflight.server.wire.api_errors import ApiError


class HasId(Protocol):
    """Whatever can be in a list."""

    @property
    def id(self) -> str:
        """Its id."""


Item = TypeVar("Item", bound=HasId)


def page_of(items: Sequence[Item], after: str | None, limit: int) -> tuple[list[Item], dict[str, Any]]:
    """Return the items after the one with the id `after`, at most `limit`, and the fields of the list around them.

    Raises `ApiError` if there is no such item.
    """
    start = 0
    if after is not None:
        places = [place for place, item in enumerate(items) if item.id == after]
        if not places:
            raise ApiError(400, f"there is nothing with the id {after[:200]!r} in this list", param="after")
        start = places[0] + 1
    shown = list(items[start : start + limit])
    fields = {
        "object": "list",
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": start + limit < len(items),
    }
    return shown, fields
