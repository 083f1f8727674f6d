"""Several engines of one model, used as one: where they run (`placement`), which of them gets a request (`router`), and
how they start, end and are replaced (`client`)."""
