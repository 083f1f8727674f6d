"""`simulate_recording`: what the real scheduler would have done with the recorded minutes, had it been set otherwise.

`inflight simulate` runs in processes of its own, with a low priority: a simulation is pure Python, and neither the
server's event loop nor the engines may wait for it.
"""

import asyncio
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from inflight.server.wire.api_errors import ApiError

SECONDS = 120.0
"""After that a simulation is given up."""

NICENESS = 10
"""Of these processes: beside busy engines they get a tenth of a core's time. With more they would get almost none."""


async def simulate_recording(recording: Path, options: list[str]) -> dict[str, Any]:
    """The report of `inflight simulate --trace RECORDING` with further options.

    Raises `ApiError`: it failed (400, with what it says) or took too long (504).
    """
    arguments = ["-m", "inflight", "simulate", "--trace", str(recording), "--json", *options]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=pipe, stderr=pipe)
    if hasattr(os, "setpriority"):
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
    try:
        async with asyncio.timeout(SECONDS):
            out, err = await process.communicate()
    except TimeoutError:
        raise ApiError(504, f"the simulation took longer than {SECONDS:g} seconds", code="timeout") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        said = err.decode(errors="replace").strip().rpartition("\n")[2].removeprefix("inflight: ")
        raise ApiError(400, f"the recorded minutes cannot be simulated so: {said}", code="not_simulated")
    report: dict[str, Any] = json.loads(out)
    return report
