"""Weight transports: one Channel a file."""
