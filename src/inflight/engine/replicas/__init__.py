"""Several engines of one model: `placement` says where they run, `router` which one gets a request."""
