"""A support agent for orders and travel: its tools before and after they changed, its requests, its verifier."""
