"""Shows what runs: counters, recordings and pictures made from `StepRecord`s. Knows no model and no scheduler."""
