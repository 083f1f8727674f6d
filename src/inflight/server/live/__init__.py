"""The live page: the engines' steps, a playground, the last hour, and simulations with other settings."""
