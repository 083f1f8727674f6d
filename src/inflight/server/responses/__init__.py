"""OpenAI's responses endpoint."""
