"""What happens to logits around the choice of a token: what a request wants changed, and what it wants to know."""
