"""The HTTP server: OpenAI's interface and Anthropic's messages over `AsyncLLM`.

`app` puts it together. What an endpoint takes stands in its request module, what it answers in the endpoint's own; all
of them generate through `generation`, answer streams through `event_stream`, and refuse through `api_errors`.
"""
