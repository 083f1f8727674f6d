"""The figures of `docs/how-it-works.md`: each function runs something, and gives a picture of it with its numbers."""
