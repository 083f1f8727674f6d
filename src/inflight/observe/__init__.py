"""Seeing what runs: counters and pictures made from `StepRecord`s. Knows no model and no scheduler."""
