"""Questions about the same documents: their common prefix is computed once.

    python examples/rag_shared_prefix.py                    # the embedded model
    python examples/rag_shared_prefix.py ./my-model

Prompts begin with what they have in common: instructions first, then the passages that were found, the question last.
What a prompt shares with an earlier one, in whole blocks of 16 tokens, comes from the prefix cache. Nothing has to be
marked; `num_cached_tokens` says how much it was.
"""

import sys

from inflight import LLM, SamplingParams

PASSAGES = {
    "owl": "In a quiet village by the sea there lived a clever owl named Luna. She had a silver key, and she loved it.",
    "fox": "A brave fox named Felix lived under an old oak tree. Every morning he went to the river to find berries.",
    "mill": "Behind the old mill there was a garden. Nobody had opened its gate for a hundred years.",
}
QUESTIONS = {
    "Who had a key?": ("owl", "mill"),
    "Where did the owl live?": ("owl", "mill"),
    "What did the owl love?": ("owl", "fox"),
    "Who lived under a tree?": ("fox", "mill"),
}


def found(question: str) -> tuple[str, ...]:
    """A stand-in for your search: which passages help. The same passages always come in the same order."""
    return QUESTIONS[question]


def prompt_for(question: str) -> str:
    passages = "\n".join(PASSAGES[name] for name in found(question))
    return f"Answer the question from these passages.\n{passages}\nQuestion: {question}\nAnswer:"


def main() -> None:
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None)
    outputs = llm.generate([prompt_for(each) for each in QUESTIONS], SamplingParams(max_tokens=10), use_tqdm=False)
    for question, output in zip(QUESTIONS, outputs, strict=True):
        cached = output.metrics.num_cached_tokens
        print(f"{question:26} {cached:3} of {len(output.prompt_token_ids)} prompt tokens from the cache")
    stats = llm.stats()
    print(f"{stats.cache_hit_rate:.0%} of all prompt tokens were not computed again")


if __name__ == "__main__":
    main()
