"""The probe: finds out at load which executor runs a model exactly, and how. Nobody's flags are believed, and no model
is known by its name: a wrong token is never an option.

`choice` first has the way *found*, on the model itself if that is small and in float32, else on its `twin`, a shrunken
float32 copy that is sensitive to its context; what a twin has shown is remembered (`verdict`). Then the model is *made
ready* to run so (its weights are prepacked) and held against its own plain results. `packed_way` does both for the
executor whose attention is ours, and by `own_attention` for those that leave it to the model.
"""
