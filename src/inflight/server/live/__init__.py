"""The live page: what the engines do, as it happens; a playground; the last hour; and what other settings would do."""
