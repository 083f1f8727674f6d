"""This machine and this process: cores, memory, garbage collection, starting a Python process. Knows no model."""
