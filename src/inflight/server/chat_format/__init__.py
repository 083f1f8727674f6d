"""How a model family writes a chat: its template, its reasoning, content and tool calls, and the grammar of calls."""
