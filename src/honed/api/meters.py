"""Prometheus meters of one gateway, in a registry of their own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class Meters:
    """Requests, tokens, latencies and the state of the capture log."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "honed_requests", "Requests by route and status.", ["route", "status"], registry=self.registry
        )
        self.tokens = Counter(
            "honed_tokens", "Tokens by kind: prompt, cached, output.", ["kind"], registry=self.registry
        )
        self.malformed = Counter(
            "honed_malformed_calls", "Tool calls of replies that could not be read.", registry=self.registry
        )
        self.first_token = Histogram("honed_first_token_seconds", "Time to the first token.", registry=self.registry)
        self.running = Gauge("honed_running_requests", "Requests being answered.", registry=self.registry)
        self.backlog = Gauge(
            "honed_capture_backlog_bytes", "Captured and not yet in the store.", registry=self.registry
        )
        self.dropped = Gauge(
            "honed_capture_dropped_records", "Records that could not be captured.", registry=self.registry
        )
        self.version = Gauge(
            "honed_serving_version", "1 for the version that serves.", ["version"], registry=self.registry
        )
        self.rollbacks = Counter("honed_rollbacks", "Versions that the watch took back.", registry=self.registry)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)
