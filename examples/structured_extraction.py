"""Turn texts into objects of a pydantic class. Every answer is valid: the schema decides which tokens may come next.

    inflight serve &                                            # or: inflight serve ./my-model
    pip install openai
    python examples/structured_extraction.py http://127.0.0.1:8000

The embedded model knows only stories, so what it extracts makes no sense; its form does.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Literal

from openai import OpenAI
from pydantic import BaseModel, Field, StringConstraints

TEXTS = (
    "The coffee machine arrived broken, and nobody answers my calls.",
    "Thank you for the quick delivery, the children love the kite.",
    "Where can I find the manual of the lamp that I bought in May?",
)


class Ticket(BaseModel):
    """What is known of a customer's message."""

    kind: Literal["complaint", "praise", "question"]
    product: Annotated[str, StringConstraints(max_length=20)]
    urgency: Annotated[int, Field(ge=1, le=5)]


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id

    def extract(text: str) -> Ticket:
        # The model does not see the schema, so the prompt describes what is wanted.
        prompt = f"Give kind, product and urgency (1 to 5) of this message as JSON:\n{text}"
        answer = client.chat.completions.parse(
            model=model, messages=[{"role": "user", "content": prompt}], response_format=Ticket, temperature=0
        )
        return answer.choices[0].message.parsed

    with ThreadPoolExecutor(len(TEXTS)) as pool:  # requests that arrive together run together
        for text, ticket in zip(TEXTS, pool.map(extract, TEXTS), strict=True):
            print(f"{text}\n    {ticket.model_dump_json()}")


if __name__ == "__main__":
    main()
