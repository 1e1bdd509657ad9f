"""The gateway's HTTP surface."""
