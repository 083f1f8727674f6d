"""Plain data for all packages: what callers pass and get, and what the packages exchange. No torch."""
