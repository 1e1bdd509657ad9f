"""The trainer: it sums weighted per-token losses and steps."""
