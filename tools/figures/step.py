"""A figure: one step of the engine as `inflight show` draws it, with which tokens attend to which."""

from inflight.contracts.api.params import SamplingParams
from inflight.entrypoints.llm import LLM
from inflight.observe.step_capture import StepCapture
from inflight.observe.step_drawing import step_figure
from tools.figures.drawing import Drawing

BUDGET, STEP = 14, 1
PROMPTS = (
    "Once upon a time",
    "One morning, a fox named Felix sat by the river.",
    "In a quiet village there lived a clever owl who loved stories.",
)


def mixed_step() -> Drawing:
    """Draw a row with a decode, the rest of a prompt and a chunk of another one, and its mask."""
    llm = LLM(dtype="float32", max_num_seqs=len(PROMPTS), max_num_batched_tokens=BUDGET, kv_cache_memory=2**26)
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    capture = StepCapture(
        llm.engine.runner.compare_attention(),
        [STEP],
        lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False),
    )
    llm.engine.observer = capture.observe
    llm.generate(list(PROMPTS), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    (view,) = capture.views
    numbers = {
        "command": f"inflight show --max-num-seqs {len(PROMPTS)} --max-num-batched-tokens {BUDGET} --step {STEP} "
        + " ".join(f'"{prompt}"' for prompt in PROMPTS),
        "spans": [[span.letter, span.kind, len(span.tokens), span.num_cached] for span in view.spans],
        "queries": view.total_q,
        "keys": view.total_q + view.total_kv,
        "difference from the definition": view.difference,
    }
    return Drawing(step_figure(view), numbers)
