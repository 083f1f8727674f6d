"""A model's ranks: processes that have a part of every weight each, run the same steps, and meet where a layer needs
what all of them have. `partition` decides who has what, `layers` are the modules in which they meet, `rank` is how."""
