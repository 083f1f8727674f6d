"""Figure: draft tokens, step by step: which came true, and which were computed for nothing."""

from dataclasses import replace

from inflight import LLM, SamplingParams
from inflight.contracts.step.record import StepRecord
from inflight.observe.pictures import new_figure
from tools.figures.drawing import ALARM, DECODE, INK, Drawing, tidy

ACCEPTED = "#4c78c8"
PROMPT = "Once upon a time, there was a shy dragon"
NUM_TOKENS = 56
OTHER_WORDS = {15: " silver", 34: " the"}
"""Places in the story at which the prediction is wrong, and what it says there."""
MOST_SIGNS = 9


def draft_tokens() -> Drawing:
    """Draw a story that was predicted but for two words, as the embedded model writes it."""
    llm, records = LLM(max_num_seqs=1), list[StepRecord]()
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    salted = {"prompt": PROMPT, "cache_salt": "another"}  # which the next run must not look into
    (plain,) = llm.generate([salted], params, use_tqdm=False)
    predicted = list(plain.outputs[0].token_ids)
    for place, word in OTHER_WORDS.items():
        predicted[place : place + 1] = tokenizer.encode(word, add_special_tokens=False)
    llm.engine.observer = records.append
    guided = replace(params, prediction=tokenizer.decode(predicted))
    (output,) = llm.generate(PROMPT, guided, use_tqdm=False)
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    tokens = output.outputs[0].token_ids
    num_prompt = len(output.prompt_token_ids)
    spans = [record.spans[0] for record in records if record.spans]

    figure = new_figure(9, 1.2 + 0.17 * len(spans))
    panel = figure.subplots()
    for row, span in enumerate(spans):
        first = span.start + span.length - span.num_draft_tokens - num_prompt  # where the step's own token lies
        places = list(range(first, first + 1 + span.num_draft_tokens))
        kinds = [DECODE] + [ACCEPTED] * span.num_accepted
        for place, colour in zip(places, kinds, strict=False):
            panel.barh(row, 0.9, left=place, height=0.8, color=colour)
        for place in places[len(kinds) :]:
            panel.barh(row, 0.8, left=place, height=0.7, color="none", edgecolor=ALARM, linewidth=0.8)
    shown = [tokenizer.decode([token])[:MOST_SIGNS].replace("\n", "↵") or "·" for token in tokens]
    panel.set_xticks([place + 0.45 for place in range(len(tokens))], shown, rotation=90, fontsize=6, color=INK)
    panel.set_yticks(range(0, len(spans), 2))
    panel.set_ylim(len(spans) - 0.4, -0.8)
    panel.set_xlim(-1, len(tokens) + 0.5)
    title = "green: chosen from the step's own row; blue: accepted draft tokens; red: rejected draft tokens"
    tidy(panel, title, "tokens of the output", "step")
    numbers = {
        "tokens": len(tokens),
        "steps": len(spans),
        "proposed": sum(span.num_draft_tokens for span in spans),
        "right": sum(span.num_accepted for span in spans),
    }
    return Drawing(figure, numbers)
