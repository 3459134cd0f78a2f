"""Measures the engine: spans, counters, and percentiles over the last values. Nothing here estimates."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

NUM_KEPT = 2048  # values per span that percentiles are taken over


@dataclass(frozen=True, slots=True)
class StageTime:
    """What one stage cost: calls, total, and percentiles over its last calls, in milliseconds."""

    num_calls: int
    total_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float


class _Span:
    def __init__(self) -> None:
        self.num_calls = 0
        self.total_s = 0.0
        self.max_s = 0.0
        self.last_s: deque[float] = deque(maxlen=NUM_KEPT)

    def add(self, seconds: float) -> None:
        self.num_calls += 1
        self.total_s += seconds
        self.max_s = max(self.max_s, seconds)
        self.last_s.append(seconds)

    def summary(self) -> StageTime:
        ordered = sorted(self.last_s)
        p50, p95, p99 = (1000 * ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in (0.5, 0.95, 0.99))
        return StageTime(self.num_calls, 1000 * self.total_s, p50, p95, p99, 1000 * self.max_s)


class Metrics:
    """Spans and counters by name. Owned by the engine thread; `stages` may be called when it rests."""

    def __init__(self) -> None:
        self._spans: dict[str, _Span] = {}
        self._counters: dict[str, int] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the body as one call of `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - began)

    def add(self, name: str, seconds: float) -> None:
        """Record one call of `name` that was timed elsewhere."""
        self._spans.setdefault(name, _Span()).add(seconds)

    def count(self, name: str, amount: int = 1) -> None:
        """Add to the counter `name`."""
        self._counters[name] = self._counters.get(name, 0) + amount

    def counter(self, name: str) -> int:
        """Value of the counter `name`; 0 where nothing was counted."""
        return self._counters.get(name, 0)

    @property
    def counters(self) -> dict[str, int]:
        """All counters."""
        return dict(self._counters)

    def stages(self) -> dict[str, StageTime]:
        """Summary of every span."""
        return {name: span.summary() for name, span in self._spans.items()}
