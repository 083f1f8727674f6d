"""Settings of the whole suite."""

import os

# Threads that wait leave their core to the other tests. (OpenMP reads it once: before torch is imported.)
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from contextlib import suppress

import torch
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from inflight.execution.kernels import kernels_available
from inflight.grammar import compiler

# The same examples in every run, however slow the machine is, and whatever modules a worker has imported before.
settings.register_profile(
    "ci", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")
providers.is_local_module_file = lambda path: False

# A core may be held up for seconds; tests of what takes too long set a limit of their own.
compiler.MAX_SECONDS = 60.0

# Matplotlib looks for fonts when it is used first on a machine, and says so; not in a test that looks at what is said.
with suppress(ImportError):
    import matplotlib.font_manager  # noqa: F401

# Tests run in one process a core: more threads each would only get in each other's way.
torch.set_num_threads(1)

# Nothing is taken from what an earlier run has proved, and nothing that a test has spoiled is left for a later one.
os.environ["INFLIGHT_REMEMBER_VERDICTS"] = "0"

# Built now if they never were: not in the middle of a test that looks at what a command prints.
assert kernels_available()
