"""The path from an HTTP request to the engine and back: chats, generation, streams, settings and status."""
