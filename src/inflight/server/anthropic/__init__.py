"""Anthropic's messages endpoint."""
