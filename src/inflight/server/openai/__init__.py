"""OpenAI's chat and completion endpoints, with vLLM's extensions."""
