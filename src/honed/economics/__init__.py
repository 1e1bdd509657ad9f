"""Prices, meters and statistics: arithmetic, no I/O."""
