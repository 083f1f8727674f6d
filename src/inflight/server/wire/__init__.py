"""What all endpoints share on the wire: strict request models, JSON bodies, error envelopes, the waiting client."""
