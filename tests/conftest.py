"""Settings of the whole suite."""

import torch
from hypothesis import settings

# The same examples in every run, however slow the machine is.
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci")

# Tests run in one process a core: more threads each would only get in each other's way.
torch.set_num_threads(1)
