"""The command in the tests' own process."""

from tests.command import command

__all__ = ["command"]
