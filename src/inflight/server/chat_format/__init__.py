"""Chat formats of model families: templates, reasoning, content and tool calls, and grammars of calls.

`learned` takes a model's `Family` from its chat template, and `families` has those that are written down.
`chat_template` writes the prompt, `answer_form` decides how the answer is written and read, `template_reader` reads it,
`call_grammar` makes the model write valid calls; `tools` has the request fields.
"""
