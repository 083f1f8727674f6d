"""The HTTP server: OpenAI's API and Anthropic's Messages API over `AsyncLLM`.

`endpoints` lists what it answers, `app` puts it together. A chat goes through `serving.chat`, whatever its API;
`chat_format` knows how the model's family writes and reads it; all endpoints generate through `serving.generation`.
"""
