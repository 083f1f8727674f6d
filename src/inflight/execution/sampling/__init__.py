"""From logits to tokens: adjustments of logits, sampling, and log-probabilities."""
