"""What all endpoints read and write: strict request models, JSON bodies, error envelopes, the client that waits."""
