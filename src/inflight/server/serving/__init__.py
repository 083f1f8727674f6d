"""From an HTTP request to the engine and back: the service, generation, streams, settings and status."""
