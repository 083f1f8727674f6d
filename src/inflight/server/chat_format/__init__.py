"""Chat formats of model families: templates, reasoning, content and tool calls, and grammars of calls.

`families` has one `Family` each. `chat_template` writes the prompt, `answer_form` decides how the answer is written and
read, `template_reader` reads it, `call_grammar` makes the model write valid calls; `tools` has the request fields.
"""
