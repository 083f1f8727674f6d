"""Several engines of one model: where they run (`placement`), and which of them gets a request (`router`)."""
