"""The census with images and sounds."""

import pytest
from click.testing import CliRunner

from inflight.census.items import examine_with
from inflight.census.report import to_markdown
from inflight.cli import app


@pytest.mark.parametrize(
    ("items", "model_type"),
    [("images", "llava"), ("images", "gemma3"), ("sounds", "glmasr"), ("sounds", "qwen2_audio")],
)
def test_a_class_is_exact_with(items: str, model_type: str) -> None:
    """Qwen2-Audio has no function that encodes."""
    finding = examine_with(items, model_type)
    assert (finding.outcome, finding.executor, finding.in_one_piece) == ("exact", "packed", False), finding
    assert finding.num_tokens == 80
    document = to_markdown([finding], {"torch": "2"}, [model_type], items=items)
    assert f"Made by `inflight census --{items} --class {model_type}`" in document
    assert "80 tokens were compared.\n" in document


@pytest.mark.parametrize(
    ("model_type", "outcome", "reason"),
    [
        ("vision-encoder-decoder", "not causal", "it is an encoder-decoder"),
        ("diffusion_gemma", "not causal", "it does not generate token by token"),
        ("mistral4", "not built", "it has no processor of images"),
    ],
)
def test_classes_that_cannot_be_tried_say_why(model_type: str, outcome: str, reason: str) -> None:
    finding = examine_with("images", model_type)
    assert finding.outcome == outcome
    assert finding.reason.startswith(reason)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("git", "texts run as sequential; one image a prompt: it takes no more"),
        ("ovis2", "texts run as packed: Ovis2ForConditionalGeneration does more with images than to replace their"),
        ("paligemma", "every prompt runs whole and alone, in the model's own generate: PaliGemmaForConditional"),
    ],
)
def test_a_class_is_exact_in_its_own_generate(model_type: str, reason: str) -> None:
    finding = examine_with("images", model_type)
    assert (finding.outcome, finding.executor, finding.num_tokens) == ("exact", "generate", 80), finding
    assert finding.reason.startswith(reason)


def test_the_peer_runs_text_only() -> None:
    done = CliRunner().invoke(app, ["census", "--images", "--peer"])
    assert done.exit_code == 2
    assert "--peer is for text; it cannot be given with --images" in done.stderr
