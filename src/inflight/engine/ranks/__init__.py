"""A model that several processes run together, its ranks: rank 0 plans, samples and reports; the others compute."""
