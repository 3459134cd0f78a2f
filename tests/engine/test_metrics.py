import pickle

import pytest

from engine import metrics
from engine.metrics import NUM_KEPT, Metrics


class Clock:
    """Time that moves when told to."""

    def __init__(self):
        self.now_s = 100.0

    def perf_counter(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    return clock


def test_nothing_measured_is_nothing_reported():
    measured = Metrics()
    assert measured.stages() == {}
    assert measured.counters == {}
    assert measured.counter("underruns") == 0
    assert measured.counters == {}  # asking is not counting


def test_a_span_measures_its_body(clock):
    measured = Metrics()
    for seconds in (0.25, 0.5):
        with measured.span("thinker"):
            clock.now_s += seconds
    clock.now_s += 10.0  # between the spans
    stage = measured.stages()["thinker"]
    assert (stage.num_calls, stage.total_ms, stage.max_ms) == (2, 750.0, 500.0)


def test_a_span_whose_body_fails_is_measured_too(clock):
    measured = Metrics()

    def fail():
        with measured.span("thinker"):
            clock.now_s += 0.125
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert measured.stages()["thinker"].total_ms == 125.0


def test_spans_inside_each_other_are_separate(clock):
    measured = Metrics()
    with measured.span("turn"):
        clock.now_s += 1.0
        with measured.span("encoder"):
            clock.now_s += 2.0
    totals = {name: stage.total_ms for name, stage in measured.stages().items()}
    assert totals == {"turn": 3000.0, "encoder": 2000.0}


def test_percentiles_are_measured_values():
    measured = Metrics()
    for milliseconds in reversed(range(1, 101)):
        measured.add("step", milliseconds / 1000)
    stage = measured.stages()["step"]
    assert (stage.p50_ms, stage.p95_ms, stage.p99_ms) == pytest.approx((51, 96, 100))
    assert stage.max_ms == pytest.approx(100)


def test_one_value_is_every_percentile():
    measured = Metrics()
    measured.add("step", 0.007)
    stage = measured.stages()["step"]
    assert (stage.p50_ms, stage.p95_ms, stage.p99_ms, stage.max_ms) == (7.0, 7.0, 7.0, 7.0)


def test_percentiles_forget_and_totals_do_not():
    measured = Metrics()
    measured.add("step", 5.0)  # the first call warms up
    for _ in range(NUM_KEPT):
        measured.add("step", 0.001)
    stage = measured.stages()["step"]
    assert (stage.p50_ms, stage.p99_ms) == (1.0, 1.0)
    assert stage.num_calls == NUM_KEPT + 1
    assert stage.max_ms == 5000.0
    assert stage.total_ms == pytest.approx(5000 + NUM_KEPT)


def test_counters_add_up_and_a_copy_does_not_change_them():
    measured = Metrics()
    measured.count("passes")
    measured.count("passes", 4)
    measured.count("drops", 0)
    assert measured.counter("passes") == 5
    counters = measured.counters
    assert counters == {"passes": 5, "drops": 0}
    counters["passes"] = 0
    assert measured.counter("passes") == 5


def test_a_summary_can_cross_a_process():
    measured = Metrics()
    measured.add("step", 0.5)
    stages = measured.stages()
    assert pickle.loads(pickle.dumps(stages)) == stages
