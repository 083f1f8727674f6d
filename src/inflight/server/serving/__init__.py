"""The path from an HTTP request to the engine and back: service, generation, streams, settings and status."""
