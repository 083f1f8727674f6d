"""GGUF, llama.cpp's file format: where such files are, and what their headers say. No torch."""
