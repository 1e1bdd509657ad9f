"""Messages to tokens and back; no torch."""
