"""Settings of the whole suite."""

import os

# Threads that wait leave their core to the other tests. (OpenMP reads it once: before torch is imported.)
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from hypothesis import settings

from inflight.execution.native import kernels_available

# The same examples in every run, however slow the machine is.
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci")

# Tests run in one process a core: more threads each would only get in each other's way.
torch.set_num_threads(1)

# Nothing is taken from what an earlier run has proved, and nothing that a test has spoiled is left for a later one.
os.environ["INFLIGHT_REMEMBER_VERDICTS"] = "0"

# Built now if they never were: not in the middle of a test that looks at what a command prints.
assert kernels_available()
