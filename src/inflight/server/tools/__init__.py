"""Tool calls: what requests say about tools, how models write calls, and how calls are found in their text.

`fields` has the request fields, `call_format` the notations of model families, `grammar` makes models write a notation,
`call_parser` reads it, and `tool_use` assembles what one request needs.
"""
