"""The use of blocks, as operators see it."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deployments.cache.mirror import Mirror
from deployments.cache.occupancy import CacheReport, Occupancy, Recomputed, cache_report, occupancy
from deployments.metrics.cache import expose_cache
from deployments.metrics.exposition import merge
from migration.kv.cache_events import BlocksStored, HostStored, PoolContents, encode_names
from migration.protocol.core_messages import Prefilled
from migration.protocol.record import CopyCounts, CopyOutcome, CopyRecord
from policies.model import SOLE_POOL, Blocks, Bytes, ReplicaId
from policies.prefix.change import Tier
from policies.prefix.copies import CopyReason


@pytest.mark.parametrize(
    ("free", "named", "partial", "expected"),
    [
        (100, 0, 0, (0, 0, 100)),
        (100, 30, 0, (0, 30, 70)),
        (60, 38, 2, (40, 0, 60)),
        (60, 50, 2, (40, 12, 48)),
        (0, 100, 0, (100, 0, 0)),
        (10, 99, 5, (90, 10, 0)),
        (100, 5, 9, (0, 5, 95)),
    ],
    ids=["empty", "all idle", "all busy", "both", "full", "full of history", "older counts"],
)
def test_blocks_are_active_historical_or_blank(
    free: int, named: int, partial: int, expected: tuple[int, int, int]
) -> None:
    used = occupancy(Blocks(100), Blocks(free), named, partial)
    assert (used.active, used.historical, used.blank) == expected


def report(mirror: Mirror, host: int = 0) -> CacheReport:
    return cache_report(mirror, Blocks(10), Blocks(8), 1, Prefilled(200, 150, 30), Blocks(host))


def exact() -> Mirror:
    mirror = Mirror()
    mirror.take(0, [PoolContents(b""), BlocksStored([1, 2, 3, 4])])
    return mirror


def test_report_for_operators() -> None:
    assert report(exact()).used == {Tier.HBM: Occupancy(Blocks(2), Blocks(3), Blocks(5))}
    assert report(exact()).to_json() == {
        "hbm": {"active": 2, "historical": 3, "blank": 5, "pinned": 0},
        "dram": None,
        "version": 0,
        "exact": True,
        "off": None,
        "prompt_tokens": {"all": 200, "hbm": 120, "dram": 30},
    }


def test_report_on_a_tier_of_host_memory() -> None:
    mirror = exact()
    mirror.take(1, [HostStored(encode_names([1, 2, 9]))])
    assert report(mirror, host=8).to_json()["dram"] == {"active": 0, "historical": 3, "blank": 5, "pinned": 0}
    shown = exposed(mirror, host=8)
    assert shown["mell_cache_blocks", "historical", "dram"] == 3 and shown["mell_cache_blocks", "blank", "dram"] == 5
    assert shown["mell_cache_delivered_tokens_total", "dram"] == 30


def test_cache_that_is_not_followed_has_a_reason_and_no_blocks() -> None:
    shown = report(Mirror("the model has 2 KV cache groups")).to_json()
    assert (shown["hbm"], shown["off"], shown["exact"]) == (None, "the model has 2 KV cache groups", False)
    assert shown["prompt_tokens"] == {"all": 200, "hbm": 120, "dram": 30}


def exposed(mirror: Mirror, made: CopyCounts | None = None, host: int = 0) -> dict[tuple[str, ...], float]:
    made = made or CopyCounts()
    text = merge([expose_cache(report(mirror, host), made, {Recomputed.DIFFERENT: 2}, SOLE_POOL, "a")]).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert all((sample.labels.pop("replica"), sample.labels.pop("pool")) == ("a", SOLE_POOL) for sample in samples)
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def test_metrics() -> None:
    copies: dict[tuple[str, ...], float] = {
        ("mell_cache_copies_total", outcome, reason): 0
        for outcome in CopyOutcome
        for reason in ("fetch", "manual", "return")
    }
    tokens: dict[tuple[str, ...], float] = {
        ("mell_cache_copy_bytes_total",): 0,
        ("mell_cache_tokens_total", "prompt"): 200,
        ("mell_cache_tokens_total", "delivered"): 150,
        ("mell_cache_delivered_tokens_total", "hbm"): 120,
        ("mell_cache_delivered_tokens_total", "dram"): 30,
        **copies,
    }
    assert exposed(exact()) == {
        **tokens,
        ("mell_cache_blocks", "active", "hbm"): 2,
        ("mell_cache_blocks", "historical", "hbm"): 3,
        ("mell_cache_blocks", "blank", "hbm"): 5,
        ("mell_cache_blocks", "pinned", "hbm"): 0,
        ("mell_cache_resyncs_total", "start"): 1,
        ("mell_cache_resyncs_total", "events_lost"): 0,
        ("mell_cache_resyncs_total", "audit"): 0,
        ("mell_cache_recomputations_total", "equal"): 0,
        ("mell_cache_recomputations_total", "different"): 2,
        ("mell_cache_recomputations_total", "skipped"): 0,
    }
    assert exposed(Mirror("the prefix cache is off")) == tokens


def test_copies_are_counted_by_reason_and_outcome() -> None:
    made = CopyCounts()
    for outcome, size in ((CopyOutcome.DONE, 100), (CopyOutcome.DONE, 20), (CopyOutcome.ABORTED, 3)):
        made.add(CopyRecord("c", ReplicaId("a"), ReplicaId("b"), CopyReason.MANUAL, "", outcome, bytes=Bytes(size)))
    shown = exposed(Mirror("the prefix cache is off"), made)
    assert shown["mell_cache_copies_total", "done", "manual"] == 2
    assert shown["mell_cache_copies_total", "aborted", "manual"] == 1
    assert shown["mell_cache_copy_bytes_total",] == 123
