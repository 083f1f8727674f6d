"""GGUF, llama.cpp's file format: finding files and reading headers. No torch."""
