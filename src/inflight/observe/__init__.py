"""Shows what runs: reports, recordings and pictures made from `StepRecord`s. Knows no model and no scheduler."""
