"""Several engines of one model, used as one: where they run (`placement`), which of them gets a request (`router`), and
how fronts reach them (`engine_client`)."""
