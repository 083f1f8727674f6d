"""What passes between scheduling, execution and observers: plans, records of steps, cache layouts, block hashes."""
