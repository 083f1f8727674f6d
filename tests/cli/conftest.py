"""The command in the tests' own process."""

from tests.command import command, refused

__all__ = ["command", "refused"]
