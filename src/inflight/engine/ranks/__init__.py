"""Tensor parallelism: several processes (ranks) run one model. Rank 0 plans, samples and reports; the others
compute."""
