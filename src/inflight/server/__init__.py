"""The HTTP server: OpenAI's API and Anthropic's Messages API over `AsyncLLM`.

`app` puts it together. An endpoint's request module defines what it accepts, its own module what it answers. All
endpoints generate through `generation`, stream through `event_stream` and report errors through `api_errors`.
"""
