"""Chat with a server through OpenAI's client.

    inflight serve &                                            # or: inflight serve ./my-model
    pip install openai
    python examples/chat_client.py http://127.0.0.1:8000

The answer is streamed. A client that has API keys sends one (`OPENAI_API_KEY`).
"""

import os
import sys

from openai import OpenAI


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = client.models.list().data[0].id
    messages = []
    for question in ("Tell me a story about a fox.", "And then?"):
        print(f"> {question}")
        messages.append({"role": "user", "content": question})
        stream = client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=60,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        answer, usage = "", None
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                answer += choice.delta.content or ""
                print(choice.delta.content or "", end="", flush=True)
        messages.append({"role": "assistant", "content": answer})
        print(f"\n({usage.prompt_tokens} prompt tokens, {usage.completion_tokens} generated)")


if __name__ == "__main__":
    main()
