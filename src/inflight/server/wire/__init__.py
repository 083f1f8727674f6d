"""The wire layer: strict request models, JSON bodies, error envelopes, and work outside the event loop."""
