"""Tensor parallelism: ranks each have a shard of every weight, run the same steps, and communicate where a layer needs
all shards. `partition` shards weights, `layers` has the communicating modules, `rank` the collectives."""
