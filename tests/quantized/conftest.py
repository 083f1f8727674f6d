"""Shared fixtures."""

from tests.command import command

__all__ = ["command"]
