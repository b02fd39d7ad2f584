"""The gateway's numbers for Prometheus, and those that workers tell with their presence. One private registry a
gateway.
"""

import re
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.fleet import Fleet

LATENCY_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
STEP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)

_UNSAFE = re.compile(r"[^a-zA-Z0-9_]")


class _Workers(Collector):
    """What live workers say of themselves, at the moment of the scrape."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def describe(self) -> Iterable[Metric]:
        """Nothing is known before the first scrape."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """One gauge a number that a stage tells, labelled by worker."""
        families: dict[str, GaugeMetricFamily] = {}
        for presence in self._fleet.alive():
            own = {"ready": float(presence.ready), "slots": presence.slots, "running": presence.running}
            for gauge, value in {**own, **presence.gauges}.items():
                name = f"headrace_{presence.stage}_{_UNSAFE.sub('_', gauge)}"
                if name not in families:
                    told = f"{gauge}, as the {presence.stage} worker tells"
                    families[name] = GaugeMetricFamily(name, told, labels=["worker"])
                families[name].add_metric([presence.worker], value)
        return families.values()


class Metrics:
    """Counters and histograms that the gateway's parts write to."""

    def __init__(self, fleet: Fleet) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "headrace_gateway_requests", "Answers by route and status", ("route", "status"), registry=registry
        )
        self.first_token = _histogram("time_to_first_token", "Arrival to first token", LATENCY_S, registry)
        self.between_tokens = _histogram("inter_token_latency", "Between two token events", STEP_S, registry)
        self.end_to_end = _histogram("end_to_end", "Arrival to terminal event", LATENCY_S, registry)
        self.in_flight = Gauge("headrace_gateway_in_flight_requests", "Streams followed now", registry=registry)
        self.endings = Counter("headrace_gateway_endings", "Streams by how they ended", ("outcome",), registry=registry)
        self.tokens = Counter("headrace_gateway_tokens", "Tokens passed to clients", registry=registry)
        self.gaps = Counter("headrace_gateway_gaps_filled", "Holes in live streams", registry=registry)
        repeated = "Live tokens that came again, and were not passed on again"
        self.repeated = Counter("headrace_gateway_repeated_tokens", repeated, registry=registry)
        self.registry.register(_Workers(fleet))

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)


def _histogram(what: str, told: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> Histogram:
    return Histogram(f"headrace_gateway_{what}_seconds", told, buckets=buckets, registry=registry)
