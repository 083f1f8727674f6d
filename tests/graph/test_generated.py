"""What is generated from the graph compiler and kept in the tree is up to date."""

import pytest
import torch

from inflight.execution.kernels import has_panels
from tests.documents.pages import ROOT, blocks
from tools.draw_graph import drawings
from tools.program_header import HEADER, cpp_header


def test_the_header_of_programs_is_generated_from_their_format() -> None:
    assert HEADER.read_text(encoding="utf-8") == cpp_header(), "run tools/program_header.py"


@pytest.mark.skipif(not has_panels(torch.float32), reason="elsewhere layers are torch's own operators")
def test_the_page_draws_what_is_traced() -> None:
    shown = tuple(block.text for block in blocks("text") if block.path == ROOT / "docs" / "graph.md")
    assert shown == drawings(), "run tools/draw_graph.py"
