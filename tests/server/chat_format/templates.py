"""Chat templates in the notations of models' families, as short as they can be, and the calls that they write."""

from collections.abc import Mapping
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

JSON, VALUE = "{{ f.arguments | tojson }}", "{{ v if v is string else v | tojson }}"
IM_START, IM_END = "<|im_start|>assistant\n", "<|im_end|>\n"
THOUGHTS = ("<think>\n", "\n</think>\n\n")


def chat(
    call: str,
    *,
    begin: str = "",
    end: str = "",
    between: str = "",
    start: str = IM_START,
    stop: str = IM_END,
    thoughts: tuple[str, str] | None = THOUGHTS,
    said: tuple[str, str] = ("", ""),
) -> str:
    """A chat template. `call` writes the function `f`; the other texts stand as they are around it, and around a
    group of calls, an answer, its reasoning, and its content."""
    reasoning = ""
    if thoughts:
        opened, closed = map(repr, thoughts)
        reasoning = f"{{% if m.reasoning_content %}}{{{{ {opened} + m.reasoning_content + {closed} }}}}{{% endif %}}"
    calls = (
        f"{{% for c in m.tool_calls %}}{{% set f = c.function %}}{{% set i = loop.index0 %}}{call}"
        f"{{% if not loop.last %}}{{{{ {between!r} }}}}{{% endif %}}{{% endfor %}}"
    )
    content = f"{{% if m.content %}}{{{{ {said[0]!r} + m.content + {said[1]!r} }}}}{{% endif %}}"
    return (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}"
        f"{{{{ {start!r} }}}}{reasoning}{content}"
        f"{{% if m.tool_calls %}}{{{{ {begin!r} }}}}{calls}{{{{ {end!r} }}}}{{% endif %}}{{{{ {stop!r} }}}}"
        f"{{% else %}}{{{{ '<|' + m.role + '|>' + m.content + {stop!r} }}}}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {start!r} }}}}{{% endif %}}"
    )


def each(begin: str, end: str) -> str:
    """Arguments one by one."""
    opened, closed = f"{{{{ {begin!r}.replace('KEY', k) }}}}", f"{{{{ {end!r} }}}}"
    return f"{{% for k, v in f.arguments.items() %}}{opened}{VALUE}{closed}{{% endfor %}}"


def _text(text: str) -> str:
    return f"{{{{ {text!r} }}}}"


XML = _text("<tool_call>\n<function=") + "{{ f.name }}" + _text(">\n")
DSML = (
    '{% for k, v in f.arguments.items() %}<｜DSML｜parameter name="{{ k }}" string="'
    "{{ 'true' if v is string else 'false' }}\">"
    f"{VALUE}</｜DSML｜parameter>{_text(chr(10))}{{% endfor %}}"
)
BARE = (
    "{% macro bare(v) %}{% if v is string %}<escape>{{ v }}<escape>"
    "{% elif v is mapping %}{{ '{' }}{% for k, x in v.items() %}"
    "{{ k }}:{{ bare(x) }}{{ '' if loop.last else ',' }}{% endfor %}{{ '}' }}{% elif v is sequence %}[{% for x in v %}"
    "{{ bare(x) }}{{ '' if loop.last else ',' }}{% endfor %}]{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)
M3 = "]<]minimax[>["
NESTED = (
    "{% macro nested(v) %}{% if v is mapping %}{% for k, x in v.items() %}"
    "{{ m3 }}<{{ k }}>{{ nested(x) }}{{ m3 }}</{{ k }}>{% endfor %}"
    "{% elif v is iterable and v is not string %}{% for x in v %}{{ m3 }}<item>{{ nested(x) }}{{ m3 }}</item>"
    "{% endfor %}{% else %}{{ v if v is string else v | tojson }}{% endif %}{% endmacro %}"
).replace("{{ m3 }}", M3)
DEEPSEEK: dict[str, Any] = {
    "begin": "<｜tool▁calls▁begin｜>",
    "end": "<｜tool▁calls▁end｜>",
    "start": "<｜Assistant｜>",
    "stop": "<｜end▁of▁sentence｜>",
    "thoughts": ("<think>", "</think>"),
}
KIMI: dict[str, Any] = {
    "begin": "<|tool_calls_section_begin|>",
    "end": "<|tool_calls_section_end|>",
    "start": "<|im_assistant|>assistant<|im_middle|>",
    "stop": "<|im_end|>",
    "thoughts": ("<think>", "</think>"),
}
KIMI_CALL = f"<|tool_call_begin|>%s<|tool_call_argument_begin|>{JSON}<|tool_call_end|>"
OBJECT = f'{{"name": "{{{{ f.name }}}}", "arguments": {JSON}}}'
GLM = {"start": "<|assistant|>", "stop": "<|user|>", "thoughts": ("<think>", "</think>\n")}

TEMPLATES = {
    "hermes": chat(_text("<tool_call>\n") + OBJECT + _text("\n</tool_call>"), between="\n"),
    "qwen3-coder": chat(
        XML + each("<parameter=KEY>\n", "\n</parameter>\n") + _text("</function>\n</tool_call>"), between="\n"
    ),
    "glm-4.5": chat(
        "<tool_call>{{ f.name }}"
        + _text("\n")
        + each("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n")
        + "</tool_call>",
        between="\n",
        **GLM,
    ),
    "glm-4.7": chat(
        "<tool_call>{{ f.name }}" + each("<arg_key>KEY</arg_key><arg_value>", "</arg_value>") + "</tool_call>", **GLM
    ),
    "deepseek-r1": chat(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}"
        + _text("\n```json\n")
        + JSON
        + _text("\n```<｜tool▁call▁end｜>"),
        between="\n",
        **DEEPSEEK,
    ),
    "deepseek-v3.1": chat(f"<｜tool▁call▁begin｜>{{{{ f.name }}}}<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>", **DEEPSEEK),
    "deepseek-v3.2": chat(
        '<｜DSML｜invoke name="{{ f.name }}">' + _text("\n") + DSML + "</｜DSML｜invoke>",
        **{**DEEPSEEK, "begin": "\n\n<｜DSML｜function_calls>\n", "end": "\n</｜DSML｜function_calls>"},
        between="\n",
    ),
    "kimi-k2": chat(KIMI_CALL % "functions.{{ f.name }}:{{ i }}", **KIMI),
    "kimi-k2, by id": chat(KIMI_CALL % "{{ c.id }}", **KIMI),
    "minimax-m2": chat(
        '<invoke name="{{ f.name }}">'
        + _text("\n")
        + each('<parameter name="KEY">', "</parameter>\n")
        + _text("</invoke>\n"),
        begin="\n<minimax:tool_call>\n",
        end="</minimax:tool_call>",
        start="]~b]ai\n",
        stop="[e~[\n",
    ),
    "minimax-m3": NESTED
    + chat(
        f'{M3}<invoke name="{{{{ f.name }}}}">{{{{ nested(f.arguments) }}}}{M3}</invoke>{_text(chr(10))}',
        begin=f"{M3}<tool_call>\n",
        end=f"{M3}</tool_call>",
        start="]~b]ai\n",
        stop="[e~[\n",
        thoughts=("<mm:think>", "</mm:think>"),
    ),
    "seed-oss": chat(
        _text("<seed:tool_call>\n<function=")
        + "{{ f.name }}"
        + _text(">\n")
        + each("<parameter=KEY>", "</parameter>\n")
        + _text("</function>\n</seed:tool_call>"),
        start="<seed:bos>assistant\n",
        stop="<seed:eos>",
        thoughts=("<seed:think>", "</seed:think>\n"),
        between="\n",
    ),
    "nemotron": chat(OBJECT, begin="<TOOLCALL>[", end="]</TOOLCALL>", between=", "),
    "command-a": chat(
        _text("\n    ") + f'{{"tool_call_id": "{{{{ i }}}}", "tool_name": "{{{{ f.name }}}}", "parameters": {JSON}}}',
        begin="<|START_ACTION|>[",
        end="\n]<|END_ACTION|>",
        between=",",
        start="<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        stop="<|END_OF_TURN_TOKEN|>",
        thoughts=("<|START_THINKING|>", "<|END_THINKING|>"),
        said=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "functiongemma": BARE
    + chat(
        "<start_function_call>call:{{ f.name }}{{ bare(f.arguments) }}<end_function_call>",
        start="<start_of_turn>model\n",
        stop="<end_of_turn>\n",
        thoughts=None,
    ),
    "mistral-nemo": chat(
        "{% if c.id | length != 9 %}{{ raise_exception('an id has nine letters') }}{% endif %}"
        + OBJECT[:-1]
        + ', "id": "{{ c.id }}"}',
        begin="[TOOL_CALLS][",
        end="]",
        between=", ",
        start="[/INST]",
        stop="</s>",
        thoughts=None,
    ),
    "apertus": chat(
        f'{{"{{{{ f.name }}}}": {JSON}}}',
        begin="<|tools_prefix|>[",
        end="]<|tools_suffix|>",
        between=", ",
        thoughts=None,
    ),
}


def written(name: str, *calls: tuple[str, Mapping[str, Any]], **more: Any) -> str:
    """An answer with these calls, as the template writes it."""
    ids = [
        {"id": f"functions.{called}:{number}" if "kimi" in name else f"quixotic{number}"}
        for number, (called, _) in enumerate(calls)
    ]
    made = [
        {**i, "function": {"name": called, "arguments": dict(given)}}
        for i, (called, given) in zip(ids, calls, strict=True)
    ]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": made, **more}]

    def rendered(number: int, *, prompts: bool) -> str:
        return str(
            render_jinja_template([messages[:number]], chat_template=TEMPLATES[name], add_generation_prompt=prompts)[0][
                0
            ]
        )

    prompt, ended = rendered(1, prompts=True), rendered(1, prompts=False)
    return rendered(2, prompts=False)[len(prompt) :].removesuffix(ended[ended.index("Hi") + 2 :])
