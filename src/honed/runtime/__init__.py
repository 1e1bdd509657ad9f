"""Places to run."""
