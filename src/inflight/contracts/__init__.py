"""Plain data that all rooms share: `api`, what users import; `step`, plans and records of steps. No torch."""
