"""The live page, without a browser."""
