"""A small retrieval: passages become vectors once, and each query finds the nearest of them.

    python examples/embeddings.py                               # or: … embeddings.py Qwen/Qwen3-Embedding-0.6B

The embedded model was made to tell stories, and the mean of its hidden states finds what is told in about the same
words. A model for embeddings finds what means the same, and needs no `task`.
"""

import sys

import numpy as np

from inflight import LLM

PASSAGES = (
    "Once upon a time there was a little fox who lived in the forest with his mother.",
    "The old lighthouse keeper climbed the stairs every evening to light the lamp.",
    "Tom and Lily baked a big cake with apples and honey for their friend.",
    "In the winter the river froze, and the children went skating on the ice.",
)
QUERIES = (
    "A small fox lived with his mother among the trees.",
    "He climbed the stairs of the lighthouse in the evening.",
    "Tom and Lily made a cake with honey.",
)


def main() -> None:
    llm = LLM(sys.argv[1]) if len(sys.argv) > 1 else LLM(task="embed")
    prompts = llm.model_info.pooling.prompts  # what some models want before a query
    prompt_name = "query" if "query" in prompts else None
    passages = vectors(llm, PASSAGES)
    queries = vectors(llm, QUERIES, prompt_name)
    for query, scores in zip(QUERIES, queries @ passages.T, strict=True):
        best = int(scores.argmax())
        print(f"{query}\n    {scores[best]:.3f}  {PASSAGES[best]}")


def vectors(llm: LLM, texts: tuple[str, ...], prompt_name: str | None = None) -> np.ndarray:
    """The texts' vectors, of length 1, so that products are cosines: `[texts, numbers]`."""
    rows = np.stack([np.asarray(output.embedding) for output in llm.embed(texts, prompt_name=prompt_name)])
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


if __name__ == "__main__":
    main()
