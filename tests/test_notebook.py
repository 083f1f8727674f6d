"""The notebook in `examples/` runs from top to bottom with this interpreter, prints what it should, and is stored with
what it prints."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

SMALLER = """
from functools import partial
from inflight.lessons import static_bench
static_bench.GPT2Config = partial(static_bench.GPT2Config, n_layer=2, n_embd=256, n_head=4)
"""
"""Code to run before the last cell, which takes most of a minute with all of GPT-2, and shows the same with less."""

NOTEBOOK = Path(__file__).parents[1] / "examples" / "continuous_batching.ipynb"


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The notebook's cells by id, after all have run; an error in any cell fails here."""
    folder = tmp_path_factory.mktemp("jupyter")
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    which_python = nbformat.v4.new_code_cell("import sys; print(sys.executable)", id="which-python")  # type: ignore[no-untyped-call]
    notebook.cells.append(which_python)
    (last,) = (place for place, cell in enumerate(notebook.cells) if cell.id == "gpt2")
    notebook.cells.insert(last, nbformat.v4.new_code_cell(SMALLER))  # type: ignore[no-untyped-call]
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as sockets:  # their names have to be short
        patch.setenv("OMP_NUM_THREADS", "1")  # one process per core, as in the whole suite
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        patch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
        NotebookClient(
            notebook,
            timeout=600,
            startup_timeout=300,
            iopub_timeout=120,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            config=Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"}),  # no port, then none is taken
        ).execute()
    return {cell.id: cell for cell in notebook.cells}


def printed(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


@pytest.mark.thorough
def test_the_notebook_runs_with_this_interpreter(cells: dict[str, Any]) -> None:
    assert printed(cells["which-python"]).strip() == sys.executable


@pytest.mark.thorough
def test_all_rungs_give_the_same_tokens(cells: dict[str, Any]) -> None:
    text = printed(cells["engine"])
    assert "All four rungs gave the same tokens" in text
    assert "'static': 180" in text


@pytest.mark.thorough
def test_the_notebook_shows_preemption(cells: dict[str, Any]) -> None:
    text = printed(cells["chunks"])
    assert "The same tokens, with" in text
    assert "with 0 preemptions" not in text


@pytest.mark.thorough
def test_a_shared_prefix_saves_most_of_the_prompts(cells: dict[str, Any]) -> None:
    static, shared = printed(cells["prefix"]).splitlines()
    assert int(shared.split()[2]) < int(static.split()[1]) / 3


@pytest.mark.thorough
def test_steps_and_timelines_are_drawn(cells: dict[str, Any]) -> None:
    assert "re-attended through reference" in printed(cells["step"])
    for name in ("static", "padded", "ragged", "engine", "step", "chunks", "gpt2"):
        assert any("image/png" in output.get("data", {}) for output in cells[name].outputs), name


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    """The notebook's cells by id, as they are in the tree."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    return {cell.id: cell for cell in notebook.cells}


def test_the_notebook_is_stored_with_the_outputs_of_one_run(stored: dict[str, Any]) -> None:
    code = [cell for cell in stored.values() if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert {output.output_type for cell in code for output in cell.outputs} == {"stream", "execute_result"}
    assert not any(output.get("name") == "stderr" for cell in code for output in cell.outputs)
    assert NOTEBOOK.stat().st_size < 2**20


def test_what_is_stored_is_of_the_kinds_that_the_cells_give(stored: dict[str, Any], cells: dict[str, Any]) -> None:
    def kinds(cell: Any) -> tuple[bool, list[list[str]]]:
        return bool(printed(cell)), [sorted(output.data) for output in cell.outputs if "data" in output]

    for name, cell in stored.items():
        if cell.cell_type == "code":
            assert kinds(cell) == kinds(cells[name]), name


@pytest.mark.parametrize("name", ["requests", "static", "engine", "texts", "chunks", "prefix"])
def test_stored_texts_are_what_the_code_prints(name: str, stored: dict[str, Any], cells: dict[str, Any]) -> None:
    assert printed(stored[name]) == printed(cells[name])
