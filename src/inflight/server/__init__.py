"""The HTTP server: OpenAI's API and Anthropic's Messages API over `AsyncLLM`.

`endpoints` lists all endpoints, `app` assembles the application. Chats of every API go through `serving.chat`;
`chat_format` writes and reads them in the model family's format; all endpoints generate through `serving.generation`.
"""
