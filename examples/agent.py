"""An agent: the model calls tools until it has an answer.

    inflight serve &                                            # or: inflight serve Qwen/Qwen3-0.6B
    pip install openai
    python examples/agent.py http://127.0.0.1:8000              # the embedded model: each call is demanded
    python examples/agent.py http://127.0.0.1:8000 auto         # a model that knows tools decides itself

With "auto" the model decides whether to call a tool. The embedded model never would, so without it `tool_choice` names
the tool of each turn. Arguments always follow the tool's schema: it is marked `strict`.
"""

import json
import sys
from collections.abc import Callable

from openai import OpenAI

CITIES = {"Paris": 18, "Oslo": 4, "Rome": 24}
MAX_TURNS = 4


def list_cities() -> str:
    return json.dumps(list(CITIES))


def temperature(city: str) -> str:
    return json.dumps({"city": city, "celsius": CITIES[city]})


FUNCTIONS: dict[str, Callable[..., str]] = {"list_cities": list_cities, "temperature": temperature}


def tool(name: str, description: str, properties: dict[str, object]) -> dict[str, object]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


TOOLS = [
    tool("list_cities", "The cities whose temperature is known", {}),
    tool("temperature", "The temperature in a city", {"city": {"type": "string", "enum": list(CITIES)}}),
]


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    decides_itself = sys.argv[2:] == ["auto"]
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "In which of the cities that you know is it warm enough for a walk?"}]
    for turn in range(MAX_TURNS):
        choice = "auto"
        if not decides_itself:
            demanded = list(FUNCTIONS)[turn : turn + 1]
            choice = {"type": "function", "function": {"name": demanded[0]}} if demanded else "none"
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, tool_choice=choice, max_tokens=200, temperature=0
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            print(f"answer: {message.content}")
            break
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
            print(f"{call.function.name}({call.function.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    main()
