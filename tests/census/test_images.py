"""The census with images."""

import pytest
from click.testing import CliRunner

from inflight.census.items import examine_with
from inflight.census.report import to_markdown
from inflight.cli import app


@pytest.mark.parametrize("model_type", ["llava", "gemma3"])
def test_a_class_is_exact_with_images(model_type: str) -> None:
    finding = examine_with("images", model_type)
    assert (finding.outcome, finding.executor, finding.in_one_piece) == ("exact", "packed", False), finding
    assert finding.num_tokens == 80
    document = to_markdown([finding], {"torch": "2"}, [model_type], items="images")
    assert f"Made by `inflight census --images --class {model_type}`" in document
    assert "80 tokens were compared.\n" in document


def test_classes_that_cannot_be_tried_say_why() -> None:
    finding = examine_with("images", "vision-encoder-decoder")
    assert (finding.outcome, finding.reason) == ("not built", "it has no processor of images")


def test_the_peer_runs_text_only() -> None:
    done = CliRunner().invoke(app, ["census", "--images", "--peer"])
    assert done.exit_code == 2
    assert "--peer is for text; it cannot be given with --images" in done.stderr
