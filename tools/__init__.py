"""Programs that make and check what the repository ships; none of them is part of the package."""
