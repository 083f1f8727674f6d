"""What users call: `LLM` waits, `AsyncLLM` is awaited, `CallbackLLM` calls back, `quantize` rounds weights."""
