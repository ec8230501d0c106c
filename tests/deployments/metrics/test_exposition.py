"""Metrics of several processes as one text: parsed again, they are what the processes counted."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from deployments.metrics.exposition import Family, expose, merge


def counted(replica: str, times: int) -> tuple[Family, ...]:
    """A counter, a gauge with a label, and a histogram, of one process."""
    registry = CollectorRegistry()
    Counter("mell_things", "Things.", registry=registry).inc(times)
    Gauge("mell_state", "State.", ["state"], registry=registry).labels('"odd"\n').set(times)
    histogram = Histogram("vllm:wait_seconds", "Waits.", buckets=[0.1, 1], registry=registry)
    for _ in range(times):
        histogram.observe(0.5)
    return expose(registry, {"replica": replica})


def parsed(text: bytes) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by sample name and labels, sorted by name of label."""
    values: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            values.setdefault(sample.name, {})[labels] = sample.value
    return values


def test_every_sample_names_its_process() -> None:
    values = parsed(merge([counted("a", 2), counted("b", 3)]))
    assert values["mell_things_total"] == {("a",): 2, ("b",): 3}
    assert values["mell_state"] == {("a", '"odd"\n'): 2, ("b", '"odd"\n'): 3}
    assert values["vllm:wait_seconds_bucket"] == {
        ("0.1", "a"): 0,
        ("1.0", "a"): 2,
        ("+Inf", "a"): 2,
        ("0.1", "b"): 0,
        ("1.0", "b"): 3,
        ("+Inf", "b"): 3,
    }
    assert values["vllm:wait_seconds_sum"] == {("a",): 1.0, ("b",): 1.5}


def test_a_family_has_one_head_and_its_samples_stand_together() -> None:
    lines = merge([counted("a", 1), counted("b", 1)]).decode().splitlines()
    assert lines[:4] == [
        "# HELP mell_state State.",
        "# TYPE mell_state gauge",
        r'mell_state{replica="a",state="\"odd\"\n"} 1.0',
        r'mell_state{replica="b",state="\"odd\"\n"} 1.0',
    ]
    assert [line for line in lines if line.startswith("# TYPE")] == [
        "# TYPE mell_state gauge",
        "# TYPE mell_things_total counter",
        "# TYPE vllm:wait_seconds histogram",
    ]


def test_a_counter_without_events_is_zero_and_not_missing() -> None:
    assert parsed(merge([counted("a", 0)]))["mell_things_total"] == {("a",): 0}


def test_a_label_without_values_yet_leaves_the_head() -> None:
    registry = CollectorRegistry()
    Counter("mell_moves", "Moves.", ["path"], registry=registry)
    assert merge([expose(registry, {})]) == b"# HELP mell_moves_total Moves.\n# TYPE mell_moves_total counter\n"


def test_only_names_with_the_prefix() -> None:
    registry = CollectorRegistry()
    Counter("vllm:steps", "Steps.", registry=registry)
    Counter("python_info", "Python.", registry=registry)
    assert [family.name for family in expose(registry, {}, "vllm:")] == ["vllm:steps"]


def test_the_times_of_creation_are_left_out() -> None:
    assert b"_created" not in merge([counted("a", 1)])


def test_nothing_is_an_empty_text() -> None:
    assert merge([]) == b""
