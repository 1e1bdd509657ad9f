"""Fills the Engine slot, and what stands between it and a Model."""
