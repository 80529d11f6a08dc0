"""The counts and times of a server, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """One registry for each server, so that several can live in a process."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("gnnlm_requests", "Answered requests.", ("path", "method", "status"), registry=registry)
        self.seconds = Histogram(
            "gnnlm_request_seconds", "Time from a request to the end of its answer.", ("path",), buckets=SECONDS,
            registry=registry,
        )  # fmt: skip
        self.first = Histogram(
            "gnnlm_first_token_seconds", "Time from a request to its first token.", buckets=SECONDS, registry=registry
        )
        self.prompt_tokens = Counter("gnnlm_prompt_tokens", "Tokens of prompts read.", ("model",), registry=registry)
        self.tokens = Counter("gnnlm_written_tokens", "Tokens written.", ("model",), registry=registry)
        self.drafted = Counter("gnnlm_drafted_tokens", "Drafted tokens checked.", ("model",), registry=registry)
        self.accepted = Counter("gnnlm_accepted_tokens", "Drafted tokens accepted.", ("model",), registry=registry)
        self.searches = Counter("gnnlm_searches", "Positions looked up in the index.", ("model",), registry=registry)
        self.steps = Counter("gnnlm_steps", "Steps of the loop that writes.", registry=registry)
        self.cancelled = Counter("gnnlm_cancelled_requests", "Requests whose client went away.", registry=registry)
        self.failed = Counter("gnnlm_failed_steps", "Steps that ended in an unexpected error.", registry=registry)
        self.waiting = Gauge("gnnlm_waiting_requests", "Requests in the queue.", registry=registry)
        self.active = Gauge("gnnlm_active_texts", "Texts being written.", registry=registry)

    def text(self) -> bytes:
        return generate_latest(self.registry)
