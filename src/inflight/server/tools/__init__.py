"""Tool calling: what requests say of tools, how models write calls, and how calls are found in what they write.

`fields` has the request's part, `call_format` the ways in which families of models write, `grammar` what makes them
write so, `call_parser` reads it, and `tool_use` puts together what one request needs of all that.
"""
