"""From logits to tokens: what requests change about logits, the choice itself, and log-probabilities."""
