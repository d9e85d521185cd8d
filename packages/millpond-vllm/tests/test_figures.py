from millpond_vllm.event_times import NEVER, EventTimes
from millpond_vllm.figures import EVERY_S, EngineTotals, EvictionCounts, FigureReporter, request_figures

TIMES = EventTimes(prompt=300, block=32, packed=2, recent=32)
WHOLE = EventTimes(prompt=300, block=32, packed=NEVER, recent=0)


def test_figures_of_a_request():
    found = request_figures(TIMES, EvictionCounts(1, 6, 0), None)
    assert found == {"events": 1, "blocks_freed": 6, "entries_kept": 64, "recent": 32, "packed_in_place": 0}


def test_a_request_without_an_event_keeps_no_packed_entries():
    found = request_figures(TIMES, EvictionCounts(), None)
    assert found is not None
    assert found["entries_kept"] == 0


def test_a_request_that_keeps_everything_has_figures_only_if_it_asked_for_something_else():
    assert request_figures(WHOLE, EvictionCounts(), None) is None
    found = request_figures(WHOLE, EvictionCounts(), "budget 40 leaves no block")
    assert found is not None
    assert found["ignored"] == "budget 40 leaves no block"


def test_totals_count_requests_by_what_they_did():
    totals = EngineTotals()
    totals.ended(TIMES, EvictionCounts(1, 6, 0), None)
    totals.ended(TIMES, EvictionCounts(), "why")
    totals.ended(WHOLE, EvictionCounts(), None)
    assert (totals.requests, totals.evicted, totals.ignored) == (2, 1, 1)


def test_the_log_has_a_line_every_ten_seconds_and_one_at_the_end():
    totals, now, lines = EngineTotals(), [0.0], []
    labels = {"model_name": "m", "engine": "log"}
    reporter = FigureReporter(totals, labels, lambda text, *given: lines.append(text % given), lambda: now[0])
    reporter.step()
    reporter.say()
    assert lines == []
    totals.evictions.events, totals.evictions.freed = 1, 6
    now[0] = EVERY_S / 2
    reporter.step()
    assert lines == []
    now[0] = EVERY_S
    reporter.step()
    assert lines == ["Evictions: 1, blocks freed: 6, packed in place: 0, requests evicted: 0 of 0, settings ignored: 0"]
    reporter.say()
    assert len(lines) == 1
    totals.evictions.events = 2
    reporter.say()
    assert len(lines) == 2


def test_counters_grow_by_what_is_new():
    import pytest

    client = pytest.importorskip("prometheus_client")
    totals = EngineTotals()
    labels = {"model_name": "m", "engine": "counters"}

    def value():
        return client.REGISTRY.get_sample_value("millpond_vllm_events_total", labels)

    first = FigureReporter(totals, labels, print)
    totals.evictions.events = 3
    first.step()
    first.step()
    assert value() == 3
    second = FigureReporter(EngineTotals(EvictionCounts(5, 0, 0)), labels, print)  # another engine of this process
    second.step()
    assert value() == 3
