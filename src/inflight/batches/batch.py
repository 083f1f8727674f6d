"""`Batch`: a batch job, under the names of OpenAI's API. Plain data."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

End: TypeAlias = Literal["completed", "expired", "cancelled"]
"""Final statuses of a job that has begun."""

Status: TypeAlias = Literal["validating", "in_progress", "finalizing", "cancelling", "failed"] | End
"""validating: its lines are read. in_progress: they are answered. finalizing: the results are written. failed: its
lines are wrong, and nothing was answered."""

UNFINISHED: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a line is invalid; `line` is its number from 1, None for the whole file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch job. Times are whole seconds of Unix time.

    Attributes:
        owner: who may see it; see `server.operations.api_keys`.
        endpoint: the only endpoint of its lines; None: any supported one.
        expires_at: when unanswered lines are cancelled; None: never.
        ends_as: its final status.
        reached: when it reached each status.
        output_expires_after: seconds for which its result files are kept; None: forever.
        num_lines, num_completed, num_failed: requests, and those that were answered, with a result and with an error.
        num_input_tokens, num_output_tokens: of all answers.
    """

    id: str
    owner: str
    input_file_id: str
    endpoint: str | None
    completion_window: str
    created_at: int
    expires_at: int | None = None
    output_expires_after: int | None = None
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    ends_as: End = "completed"
    reached: dict[str, int] = field(default_factory=dict)
    errors: tuple[LineError, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_input_tokens: int = 0
    num_output_tokens: int = 0

    @property
    def is_finished(self) -> bool:
        """Whether it is finished."""
        return self.status not in UNFINISHED
