"""`simulate_recording`: simulates the recorded minutes with other settings.

`inflight simulate` runs in separate processes, with a low priority: a simulation is pure Python, and must not delay the
server's event loop or the engines.
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
"""Seconds after which a simulation is cancelled."""

NICENESS = 10
"""The processes' niceness: beside busy engines they get a tenth of a core. With a higher one they would get almost
none."""


async def simulate_recording(recording: Path, options: list[str]) -> dict[str, Any]:
    """The report of `inflight simulate --trace RECORDING` with further options.

    Raises `ApiError`: it failed (400, with its message) or took too long (504).
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
