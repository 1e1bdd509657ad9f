"""Environments, verifiers and sandboxes."""
