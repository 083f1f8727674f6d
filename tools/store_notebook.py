"""Run the example notebook from top to bottom, and store it with its outputs.

python -m tools.store_notebook

It is run with this interpreter, from this tree, on one thread: other processes on the machine then disturb the methods
about equally. Execution times are left out, so that only what changed differs.
"""

import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "examples" / "continuous_batching.ipynb"


def main() -> None:
    """Run and store it."""
    os.environ["OMP_NUM_THREADS"] = "1"
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": NOTEBOOK.parent}},
    ).execute()
    nbformat.write(notebook, NOTEBOOK)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
