"""The user API: `LLM` (synchronous), `AsyncLLM` (asyncio), `CallbackLLM` (callbacks), and `quantize`."""
