"""Programs that make and check what the repository ships. They are not part of the package."""
