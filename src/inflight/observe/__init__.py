"""Observability: reports, recordings and pictures from `StepRecord`s. Knows no model and no scheduler."""
