"""Weights: loading, adapters, checkpoints, attention layouts."""
