"""Tool calls: what requests say about tools, and how models are made to write calls.

`fields` has the request fields, `grammar` makes models write their family's notation, and `tool_use` assembles what one
request needs. `server/answers` reads calls.
"""
