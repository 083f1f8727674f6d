"""Plain data that all rooms share: what callers give and get, and what one room hands to the next. No torch."""
