"""The figures of `docs/how-it-works.md`: each function runs something and returns a picture of it with its numbers."""
