"""What all endpoints share on the wire: strict request models, JSON bodies, error envelopes, and work off the loop."""
