"""Answers: how a model's text is divided into thoughts, content and tool calls.

`families` and `call_format` know how models write, `answer_template` which of that applies to a model,
`template_reader` reads a text as it grows, `call_text` knows where a call ends and what it says, `blocks` and `message`
give what was read the form of an API.
"""
