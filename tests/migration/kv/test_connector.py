"""Both halves of the vLLM connector, driven with the calls that vLLM makes, without an engine."""

import importlib
import random
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from migration.kv.cache_events import decode_batch, encode_names
from migration.kv.copier.tables import BlockLoad, TableChange
from migration.kv.layout import CacheLayout
from migration.protocol.errors import BlocksGone

pytestmark = pytest.mark.slow
"""Importing vLLM takes seconds; this file imports it only inside tests."""

BLOCK, BLOCKS = 4, 16


@dataclass
class Request:
    """vLLM's Request, reduced to the fields that the connector uses."""

    request_id: str = "v1"
    kv_transfer_params: dict[str, Any] | None = None
    prompt_token_ids: list[int] = field(default_factory=lambda: [1, 2, 3, 4])
    num_prompt_tokens: int = 4
    num_tokens: int = 4
    num_output_tokens: int = 0
    max_tokens: int = 100
    sampling_params: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(seed=None))
    structured_output_request: SimpleNamespace | None = None
    _output_token_ids: list[int] = field(default_factory=list)


@dataclass
class New:
    """vLLM's NewRequestData."""

    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int = 0
    prompt_token_ids: list[int] | None = None
    prefill_token_ids: list[int] | None = None


@dataclass
class Cached:
    """vLLM's CachedRequestData."""

    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)


@dataclass
class Scheduled:
    """vLLM's SchedulerOutput."""

    num_scheduled_tokens: Mapping[str, int] = field(default_factory=dict)
    scheduled_new_reqs: Sequence[New] = ()
    scheduled_cached_reqs: Cached = field(default_factory=Cached)
    finished_req_ids: frozenset[str] = frozenset()
    preempted_req_ids: frozenset[str] | None = None


@dataclass
class Allocated:
    """vLLM's KVCacheBlocks."""

    ids: list[int]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self.ids,)


def attention(**members: Any) -> Any:
    """vLLM's specification of layers with full attention."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float32, **members)


def make_connector(groups: int = 1, workers: int = 1, spec: Any = None, device: str = "cuda") -> Any:
    """The connector of a cache with that many groups of one specification; by default, of full attention."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from migration.kv.connector import MellConnector

    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=BLOCK),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
        parallel_config=SimpleNamespace(world_size=workers),
        device_config=SimpleNamespace(device_type=device),
    )
    group = SimpleNamespace(kv_cache_spec=spec or attention())
    cache = SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[group] * groups)
    return MellConnector(config, KVConnectorRole.WORKER, cache)


def request(first: int | None = None, last: int = 0, key: str = "r.0", id: str = "v1") -> Request:
    """A request, or the load "m.1" of blocks [first, last) if `first` is given."""
    load = {"mell_key": key} if first is None else {"mell_load": {"load": "m.1", "first": first, "last": last}}
    return Request(id, load)


def known(first: int | None = None, last: int = 0, groups: int = 1) -> tuple[Any, Request]:
    """A connector, and a request or a load added to it."""
    connector, asked = make_connector(groups), request(first, last)
    connector.on_new_request(asked)
    return connector, asked


def start(connector: Any, blocks: list[int], tokens: int, computed: int = 0) -> Any:
    """The step in which request v1 is first scheduled."""
    return connector.build_connector_meta(Scheduled({"v1": tokens}, [New("v1", (blocks,), computed)]))


def decode(
    connector: Any, before: int, fresh: list[int] | None = None, tokens: int = 1, *, resumed: bool = False
) -> list[Any]:
    """The table changes of a later step in which request v1 computes `tokens` tokens after `before`."""
    cached = Cached(["v1"], [(fresh,) if fresh else None], [before], {"v1"} if resumed else set())
    changes: list[Any] = connector.build_connector_meta(Scheduled({"v1": tokens}, (), cached)).changes
    return changes


def change(computed: int, *blocks: int, replace: bool = False, caught_up: bool = True) -> TableChange:
    return TableChange("r.0", computed, list(blocks), replace, caught_up)


def step_output(**members: Any) -> Any:
    """What the workers report at the end of a step."""
    from vllm.v1.outputs import KVConnectorOutput

    return KVConnectorOutput(**members)


# --- scheduler side: loads ----------------------------------------------------------------------------


def admit(connector: Any, asked: Request, blocks: list[int], tokens: int) -> Any:
    """Allocate blocks to a load, `tokens` tokens of them to be filled; the step in which it is admitted."""
    connector.update_state_after_alloc(asked, Allocated(blocks), tokens)
    return connector.build_connector_meta(Scheduled())


@pytest.mark.parametrize(
    ("first", "last", "computed", "matched"),
    [
        (0, 3, 0, (12, True)),
        (0, 3, 4, (8, True)),
        (2, 3, 8, (4, True)),
        (0, 3, 12, (0, False)),
        (0, 3, 16, (0, False)),
        (2, 3, 4, (0, False)),
        (2, 3, 0, (0, False)),
    ],
    ids=[
        "the whole context, if nothing is cached",
        "the tokens beyond the cache",
        "blocks that continue the cache",
        "nothing, if the cache has as much",
        "nothing, if the cache has more",
        "nothing, if there is a gap before them",
        "nothing, if the rounds before them were evicted",
    ],
)
def test_load_covers(first: int, last: int, computed: int, matched: tuple[int, bool]) -> None:
    connector, asked = known(first, last)
    assert connector.get_num_new_matched_tokens(asked, computed) == matched


@pytest.mark.parametrize(
    "params", [None, {}, {"mell_key": "r.0"}], ids=["no parameters", "no Mell parameters", "only a key"]
)
def test_request_without_a_load_matches_nothing(params: dict[str, Any] | None) -> None:
    connector, asked = make_connector(), Request("v1", params)
    connector.on_new_request(asked)
    assert connector.get_num_new_matched_tokens(asked, 0) == (0, False)


def test_match_can_be_repeated_for_a_load_that_was_not_admitted() -> None:
    connector, asked = known(0, 3)
    assert connector.get_num_new_matched_tokens(asked, 0) == (12, True)
    assert connector.get_num_new_matched_tokens(asked, 4) == (8, True)


def test_load_is_admitted_once() -> None:
    connector, asked = known(0, 2)
    assert len(admit(connector, asked, [5, 6, 7], 8).loads) == 1
    assert connector.get_num_new_matched_tokens(asked, 0) == (0, False)
    assert admit(connector, asked, [5, 6, 7], 0).loads == [], "vLLM repeats this call once the blocks have arrived"


@pytest.mark.parametrize(
    ("first", "tokens", "start", "blocks"),
    [(0, 12, 0, [5, 6, 7]), (0, 4, 2, [7]), (1, 8, 1, [6, 7]), (0, 0, 3, [])],
    ids=["all", "those beyond the cache", "those of a later round", "none, if the cache has them"],
)
def test_load_fills_blocks_at_their_index_in_the_table(first: int, tokens: int, start: int, blocks: list[int]) -> None:
    connector, asked = known(first, 3)
    (load,) = admit(connector, asked, [5, 6, 7, 8], tokens).loads
    assert (load.load, load.request_id, load.first, load.blocks) == ("m.1", "v1", start, blocks)


def test_end_of_a_load_is_reported_once() -> None:
    connector, _ = known(0, 3)
    ended = Scheduled(finished_req_ids=frozenset({"v1"}))
    assert connector.build_connector_meta(ended).ended == ["m.1"]
    assert connector.build_connector_meta(ended).ended == []


class CacheManager:
    """vLLM's KVCacheManager: the requests whose blocks it was asked to name, and their tokens."""

    def __init__(self) -> None:
        self.cached: list[tuple[str, int]] = []
        self.block_pool = None

    def cache_blocks(self, request: Request, tokens: int) -> None:
        self.cached.append((request.request_id, tokens))


def arrive(connector: Any, **workers: int) -> None:
    """A step whose workers report loads as arrived; the load m.1 is `m1`."""
    from migration.kv.connector import StepReport

    meta = StepReport({name.replace("m", "m."): count for name, count in workers.items()})
    connector.update_connector_output(step_output(kv_connector_worker_meta=meta))


def filling(workers: int = 1) -> tuple[Any, Request, CacheManager]:
    """A connector with the load m.1 of three blocks under way, and the cache that names its blocks."""
    connector, manager = make_connector(workers=workers), CacheManager()
    connector.bind_kv_cache_manager(manager)
    asked = request(0, 3)
    connector.on_new_request(asked)
    admit(connector, asked, [5, 6, 7], 12)
    return connector, asked, manager


def test_blocks_are_named_once_they_have_arrived_and_the_workers_learn_it() -> None:
    connector, _, manager = filling()
    connector.update_connector_output(step_output(kv_connector_worker_meta=None))
    assert manager.cached == []
    arrive(connector, m1=1, m2=1)
    assert manager.cached == [("v1", 12)]
    assert connector.build_connector_meta(Scheduled()).cached == ["m.1"]
    assert connector.build_connector_meta(Scheduled()).cached == []


def test_blocks_are_named_when_they_have_arrived_in_all_workers() -> None:
    connector, _, manager = filling(workers=3)
    arrive(connector, m1=1)
    assert manager.cached == []
    arrive(connector, m1=2)
    assert manager.cached == [("v1", 12)]


def test_blocks_are_named_before_a_request_that_knows_of_their_arrival() -> None:
    """The report of the workers may come only with the end of the step in flight."""
    connector, _, manager = filling(workers=2)
    connector.on_new_request(Request("v2", {"mell_key": "r.1", "mell_filled": ["m.1", "m.0"]}))
    assert manager.cached == [("v1", 12)]
    arrive(connector, m1=2)
    assert manager.cached == [("v1", 12)], "they have their name by now"
    assert connector.build_connector_meta(Scheduled()).cached == ["m.1"]


def test_workers_reports_are_added() -> None:
    from migration.kv.connector import StepReport

    both = StepReport({"m.1": 1, "m.2": 1}).aggregate(StepReport({"m.1": 1}, frozenset({"r.0"})))
    assert both == StepReport({"m.1": 2, "m.2": 1}, frozenset({"r.0"}))


@pytest.mark.parametrize(("limit", "last"), [(100, 8), (8, 8), (7, 7)], ids=["early", "at its end", "over"])
def test_halted_request_ends_with_its_next_token(limit: int, last: int) -> None:
    from migration.kv.connector import StepReport

    connector = make_connector()
    running = {key: Request(f"v.{key}", {"mell_key": key}) for key in ("r.0", "s.0")}
    for each in running.values():
        connector.on_new_request(each)
        each.num_output_tokens, each.max_tokens = 7, limit
    report = StepReport(halts=frozenset({"r.0", "gone.0"}))
    connector.update_connector_output(step_output(kv_connector_worker_meta=report))
    assert (running["r.0"].max_tokens, running["s.0"].max_tokens) == (last, limit)


def test_worker_reports_each_request_to_be_halted_once() -> None:
    connector = make_connector()
    assert connector.build_connector_worker_meta() is None
    connector.halts.extend(["r.0", "s.0"])
    assert connector.build_connector_worker_meta().halts == {"r.0", "s.0"}
    assert connector.build_connector_worker_meta() is None


def test_blocks_of_an_aborted_load_are_not_named() -> None:
    """Its blocks may be another request's when the report arrives."""
    connector, asked, manager = filling()
    assert connector.request_finished_all_groups(asked, ([5, 6, 7],)) == (False, None)
    arrive(connector, m1=1)
    connector.on_new_request(Request("v2", {"mell_filled": ["m.1"]}))
    assert manager.cached == [] and connector.build_connector_meta(Scheduled()).cached == []


def test_loads_hold_at_most_half_of_the_cache() -> None:
    """Blocks of a load that waits cannot be preempted."""
    connector, asked = known(0, 5)
    admit(connector, asked, [1, 2, 3, 4, 5], 20)
    small, large = request(0, 3, id="v2"), request(0, 4, id="v3")
    for other in (small, large):
        connector.on_new_request(other)
    assert connector.get_num_new_matched_tokens(large, 0) == (None, False), "5 and 4 blocks of 16 are over the half"
    assert connector.get_num_new_matched_tokens(small, 0) == (12, True)
    connector.update_connector_output(step_output(finished_recving={"v1"}, kv_connector_worker_meta=None))
    assert connector.get_num_new_matched_tokens(large, 0) == (16, True)


def test_load_larger_than_the_bound_is_admitted_alone() -> None:
    connector, asked = known(0, 12)
    assert connector.get_num_new_matched_tokens(asked, 0) == (48, True)


# --- scheduler side: holds ----------------------------------------------------------------------------


def holding(id: str = "v1", hold: str = "h") -> tuple[Any, Request]:
    """A connector, and a hold added to it."""
    connector, asked = make_connector(), Request(id, {"mell_hold": hold})
    connector.on_new_request(asked)
    return connector, asked


def held_table(*blocks: int) -> TableChange:
    return TableChange("h", len(blocks) * BLOCK, list(blocks), replace=True, caught_up=True, held=True)


@pytest.mark.parametrize("cached", [0, 4, 12])
def test_hold_waits_for_one_token_behind_what_is_cached(cached: int) -> None:
    connector, asked = holding()
    assert connector.get_num_new_matched_tokens(asked, cached) == (1, True)
    assert connector.get_num_new_matched_tokens(asked, cached) == (1, True), "vLLM may ask again"


@pytest.mark.parametrize("prefix", [[], [5], [5, 9, 2]])
def test_hold_has_the_cached_blocks_and_a_load_of_the_one_behind_them(prefix: list[int]) -> None:
    connector, asked = holding()
    meta = admit(connector, asked, [*prefix, 7], 1)
    assert meta.held == [held_table(*prefix)] and meta.changes == []
    assert meta.loads == [BlockLoad("h", "v1", len(prefix), [7])]
    again = connector.build_connector_meta(Scheduled())
    assert again.held == [] and again.loads == []


def test_hold_that_vllm_runs_holds_nothing() -> None:
    connector, asked = holding()
    meta = admit(connector, asked, [5, 9], 0)
    assert meta.held == [] and meta.loads == []


def test_end_of_a_hold_voids_its_table_and_gives_its_blocks_back() -> None:
    connector, asked = holding()
    admit(connector, asked, [5, 7], 1)
    ended = connector.build_connector_meta(Scheduled(finished_req_ids=frozenset({"v1"})))
    assert (ended.gone, ended.ended) == (["h"], ["h"])
    again = connector.build_connector_meta(Scheduled(finished_req_ids=frozenset({"v1"})))
    assert (again.gone, again.ended) == ([], [])


def test_holds_count_as_loads_towards_half_of_the_cache() -> None:
    connector, asked = holding()
    admit(connector, asked, [1, 2, 3, 4, 5, 6], 1)
    load = request(0, 3, id="v2")
    connector.on_new_request(load)
    assert connector.get_num_new_matched_tokens(load, 0) == (None, False), "6 and 3 blocks of 16 are over the half"
    other = Request("v3", {"mell_hold": "g"})
    connector.on_new_request(other)
    assert connector.get_num_new_matched_tokens(other, 8) == (None, False), "2 held blocks, and one behind them"
    assert connector.get_num_new_matched_tokens(other, 4) == (1, True)


# --- scheduler side: tails ----------------------------------------------------------------------------


def with_tail(first: int, tokens: int, known_tokens: int = 12) -> tuple[Any, Request]:
    """A request of `known_tokens` tokens, which comes with a tail."""
    connector = make_connector()
    params = {"mell_key": "r.0", "mell_tail": {"name": "m.tail", "first": first, "tokens": tokens}}
    asked = Request("v1", params, num_tokens=known_tokens)
    connector.on_new_request(asked)
    return connector, asked


@pytest.mark.parametrize(
    ("first", "tokens", "computed", "covered"),
    [(2, 10, 8, 2), (1, 10, 8, 2), (1, 10, 4, 6), (2, 8, 8, 0), (2, 10, 4, 0), (2, 12, 8, 3), (2, 7, 8, 0)],
    ids=[
        "behind the cache",
        "a block of it in the cache",
        "two blocks",
        "all of it in the cache",
        "a gap before it",
        "never the last token",
        "the cache has more",
    ],
)
def test_tail_counts_as_computed(first: int, tokens: int, computed: int, covered: int) -> None:
    connector, asked = with_tail(first, tokens)
    assert connector.get_num_new_matched_tokens(asked, computed) == (covered, False)


def test_first_step_copies_the_tail_into_the_requests_blocks() -> None:
    from migration.kv.connector import TailLoad

    connector, asked = with_tail(1, 10)
    covered, _ = connector.get_num_new_matched_tokens(asked, 8)
    connector.update_state_after_alloc(asked, Allocated([5, 6, 7]), covered)
    first_step = start(connector, [5, 6, 7], 2, 10)
    assert (first_step.tails, first_step.needless) == ([TailLoad("m.tail", 1, [7])], [])
    # An abort since the step was planned does not take the tail from it: vLLM has named the block that the step fills.
    after = connector.build_connector_meta(Scheduled(finished_req_ids=frozenset({"v1"})))
    assert (after.tails, after.needless) == ([], [])
    assert connector.get_num_new_matched_tokens(asked, 8) == (0, False), "after a preemption it is not there any more"


def test_tail_that_covers_nothing_is_dropped() -> None:
    connector, asked = with_tail(2, 10)
    connector.update_state_after_alloc(asked, Allocated([5, 6, 7]), 0)
    first_step = start(connector, [5, 6, 7], 12)
    assert (first_step.tails, first_step.needless) == ([], ["m.tail"])
    assert connector.build_connector_meta(Scheduled()).needless == []


def test_tail_of_a_request_that_ends_before_its_first_step_is_dropped() -> None:
    connector, _ = with_tail(1, 10)
    ended = Scheduled(finished_req_ids=frozenset({"v1"}))
    assert [connector.build_connector_meta(ended).needless for _ in range(2)] == [["m.tail"], []]


def test_blocks_of_a_failed_tail_lose_their_names_even_if_their_request_was_aborted() -> None:
    connector = make_connector()
    small = SmallPool(connector)
    small.run(range(2 * BLOCK))
    named = [block.block_id for block in small.pool.blocks if block.block_hash is not None]
    connector.update_connector_output(step_output(invalid_block_ids={named[1], BLOCKS - 1}))
    assert [block.block_id for block in small.pool.blocks if block.block_hash is not None] == named[:1]
    assert small.pool.get_cached_block(small.key(range(2 * BLOCK)), [0]) is None


# --- scheduler side: output so far --------------------------------------------------------------------


def first_step(outputs: int, seed: int | None = None, whole: list[int] | None = None) -> tuple[Request, New, Any]:
    """A request in its first step, its scheduler output, and the outputs for the worker to restore."""
    asked = request()
    asked.kv_transfer_params = {"mell_key": "r.0", "mell_output": outputs}
    asked.sampling_params.seed = seed
    connector = make_connector()
    connector.on_new_request(asked)
    assert asked.num_prompt_tokens == 4, "admission counts the whole prompt"
    new = New("v1", ([5],), 0, asked.prompt_token_ids, whole)
    meta = connector.build_connector_meta(Scheduled({"v1": 4}, [new]))
    assert connector.build_connector_meta(Scheduled({"v1": 4}, [new])).outputs == {}
    return asked, new, meta.outputs


@pytest.mark.parametrize(
    ("outputs", "seed", "restored"),
    [(0, None, {}), (0, 7, {"v1": 0}), (3, None, {"v1": 3}), (1, 7, {"v1": 1})],
    ids=["new", "new and seeded", "moved", "moved and seeded"],
)
def test_output_is_split_from_the_prompt_of_a_request(outputs: int, seed: int | None, restored: dict[str, int]) -> None:
    asked, new, to_restore = first_step(outputs, seed)
    cut = 4 - outputs
    assert (asked.prompt_token_ids, asked._output_token_ids) == ([1, 2, 3, 4][:cut], [1, 2, 3, 4][cut:])
    assert asked.num_prompt_tokens == cut
    assert to_restore == restored
    assert new.prompt_token_ids == [1, 2, 3, 4], "V1 builds its batch from this"


def test_model_runner_v2_gets_the_split_prompt_and_restores_nothing() -> None:
    _, new, to_restore = first_step(3, 7, whole=[1, 2, 3, 4])
    assert (new.prompt_token_ids, new.prefill_token_ids, to_restore) == ([1], [1, 2, 3, 4], {})


# --- scheduler side: block tables ---------------------------------------------------------------------


def test_new_request_sets_its_block_table() -> None:
    connector, _ = known()
    assert start(connector, [5, 6], tokens=6, computed=4).changes == [change(10, 5, 6, replace=True)]


def test_request_without_a_key_has_no_block_table() -> None:
    connector = make_connector()
    connector.on_new_request(Request("v1", None))
    assert start(connector, [5], 4).changes == []
    assert decode(connector, 4, [6]) == []


@pytest.mark.parametrize(
    ("before", "fresh", "tokens", "changes"),
    [(5, None, 1, False), (6, None, 1, False), (7, None, 1, True), (8, [9], 1, True), (5, None, 2, True)],
    ids=[
        "nothing inside a block",
        "nothing before the last token of a block",
        "a change when a block fills",
        "a change when a block is added",
        "a change in each step of a chunked prefill",
    ],
)
def test_step_reports(before: int, fresh: list[int] | None, tokens: int, changes: bool) -> None:
    connector, _ = known()
    start(connector, [5, 6], 5)
    assert decode(connector, before, fresh, tokens) == ([change(before + tokens, *fresh or [])] if changes else [])


def test_request_is_caught_up_once_its_known_tokens_are_computed() -> None:
    """A step that computes one token inside a block may be the end of a prefill: it is reported, later ones are not."""
    connector, asked = known()
    asked.num_tokens = 7
    assert start(connector, [5, 6], 5).changes == [change(5, 5, 6, replace=True, caught_up=False)]
    assert decode(connector, 5) == [change(6, caught_up=False)]
    assert decode(connector, 6) == [change(7)]
    asked.num_tokens = 9
    assert decode(connector, 8) == []


def test_resumed_request_has_to_catch_up() -> None:
    connector, asked = known()
    start(connector, [5, 6], 5)
    asked.num_tokens = 8
    assert decode(connector, 0, [8, 9], 5, resumed=True) == [change(5, 8, 9, replace=True, caught_up=False)]


def test_resumed_request_replaces_its_table() -> None:
    connector, _ = known()
    start(connector, [5, 6], 5)
    assert decode(connector, 0, [8, 9], 5, resumed=True) == [change(5, 8, 9, replace=True)]


def test_preempted_request_loses_its_table_and_keeps_its_key() -> None:
    connector, _ = known()
    start(connector, [5, 6], 5)
    assert connector.build_connector_meta(Scheduled(preempted_req_ids=frozenset({"v1"}))).gone == ["r.0"]
    assert decode(connector, 0, [8, 9], 5, resumed=True) == [change(5, 8, 9, replace=True)]


def test_finished_request_is_forgotten() -> None:
    connector, _ = known()
    ended = Scheduled(finished_req_ids=frozenset({"v1"}))
    assert connector.build_connector_meta(ended).gone == ["r.0"]
    assert connector.build_connector_meta(ended).gone == []


class SmallPool:
    """vLLM's own block pool, and requests that take and fill its blocks."""

    def __init__(self, connector: Any) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.pool = BlockPool(BLOCKS, True, BLOCK, enable_kv_cache_events=True)
        manager = SimpleNamespace(block_pool=self.pool, evict_blocks=self.pool.evict_blocks)
        connector.bind_kv_cache_manager(manager)
        self.connector = connector

    def key(self, prompt: Sequence[int]) -> Any:
        """vLLM's hash of a prompt's last full block."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request as VllmRequest

        return VllmRequest("v1", list(prompt), SamplingParams(), None, block_hasher=self.hasher).block_hashes[-1]

    def run(self, prompt: Sequence[int]) -> None:
        """A request that computes its whole prompt, whatever is cached, and ends."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request as VllmRequest

        running = VllmRequest("v1", list(prompt), SamplingParams(max_tokens=1), None, block_hasher=self.hasher)
        full = len(prompt) // BLOCK
        blocks = self.pool.get_new_blocks(full)
        self.pool.cache_full_blocks(running, blocks, 0, full, BLOCK, 0)
        self.pool.free_blocks(reversed(blocks))

    def step(self, mirror: Any) -> None:
        """Publish a step's events as vLLM's scheduler does."""
        import msgspec
        from vllm.distributed.kv_events import KVEventBatch

        events = [*self.pool.take_events(), *self.connector.take_events()]
        if events:
            payload = msgspec.msgpack.Encoder().encode(KVEventBatch(ts=0.0, events=events))
            mirror.take(mirror.version + 1, decode_batch(payload))


def test_contents_of_the_cache_follow_its_events_if_a_request_asks_for_them() -> None:
    from deployments.cache.mirror import Mirror, Resync

    small, mirror, draw = SmallPool(connector := make_connector()), Mirror(), random.Random(7)
    connector.on_new_request(Request(kv_transfer_params={"mell_contents": True}))
    small.run(range(8))
    small.step(mirror)
    assert mirror.exact and mirror.hbm.blocks == 2
    twins = False
    for turn in range(60):
        small.run([draw.randrange(2) for _ in range(draw.randrange(1, 4) * BLOCK)])
        if turn % 20 == 19:
            small.pool.reset_prefix_cache()
        if turn % 3 == 0:
            connector.on_new_request(Request(kv_transfer_params={"mell_contents": True}))
        checks = mirror.checks
        small.step(mirror)
        assert mirror.checks == checks + (turn % 3 == 0)
        twins |= mirror.hbm.blocks > len(mirror.hbm.counts)
    assert mirror.checks == 21 and mirror.resyncs == {Resync.START: 1}, "the events give what the pool has"
    assert twins, "there were blocks of one name"


def test_request_deletes_blocks_by_name_and_its_end_has_their_number() -> None:
    from deployments.cache.mirror import Mirror

    small, mirror = SmallPool(connector := make_connector()), Mirror()

    def delete(names: bytes | None) -> int:
        """Order a deletion; the number in the reply."""
        order = Request(kv_transfer_params={"mell_delete": {"names": names}})
        connector.on_new_request(order)
        small.step(mirror)
        held, reply = connector.request_finished_all_groups(order, ((),))
        assert not held and reply is not None
        assert connector.request_finished_all_groups(order, ((),)) == (False, None), "a reply comes once"
        return int(reply["mell_blocks"])

    connector.on_new_request(Request(kv_transfer_params={"mell_contents": True}))
    small.run(range(4 * BLOCK))
    small.run(range(100, 100 + BLOCK))
    running = small.pool.get_cached_block(small.key(range(BLOCK)), [0])
    small.pool.touch(running)
    small.step(mirror)
    names = list(mirror.hbm.counts)
    free = small.pool.get_num_free_blocks()
    assert delete(encode_names(names[:2])) == 2, "the first of them is in use"
    assert set(mirror.hbm.counts) == set(names[2:]) and mirror.exact
    assert running[0].ref_cnt == 1 and small.pool.get_num_free_blocks() == free, "its request keeps it"
    assert delete(encode_names(names[:2])) == 0
    assert delete(b"") == 0 and delete(None) == 3
    assert not mirror.hbm.counts and small.pool.get_cached_block(small.key(range(BLOCK)), [0]) is None
    small.run(range(4 * BLOCK))
    small.step(mirror)
    assert set(mirror.hbm.counts) == set(names[:4]), "deleted blocks are computed and found again"


def test_cache_with_several_groups_records_no_events() -> None:
    small = SmallPool(connector := make_connector(groups=2))
    assert "2 KV cache groups" in connector.unmirrored
    connector.on_new_request(Request(kv_transfer_params={"mell_contents": True}))
    small.run(range(8))
    assert (small.pool.take_events(), list(connector.take_events())) == ([], [])


def test_model_with_several_cache_groups_has_no_tables() -> None:
    connector, _ = known(groups=2)
    assert start(connector, [5, 6], 5).changes == []


def spec_of(kind: str) -> Any:
    """A specification of vLLM's, by its kind."""
    from vllm.v1 import kv_cache_interface as vllm

    sizes: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    match kind:
        case "full":
            return attention(sliding_window=None)
        case "fp8":
            return attention(kv_quant_mode=vllm.KVQuantMode.FP8_PER_TENSOR)
        case "scales per token":
            return attention(kv_quant_mode=vllm.KVQuantMode.INT8_PER_TOKEN_HEAD)
        case "full as window":
            return attention(sliding_window=8)
        case "MLA":
            return vllm.MLAAttentionSpec(**sizes)
        case "window":
            return vllm.SlidingWindowSpec(**sizes, sliding_window=8)
        case "retention":
            return vllm.RSWASpec(**sizes, rswa_window=8)
        case "compressed":
            return vllm.MLAAttentionSpec(**sizes, tokens_per_state=4)
        case "state":
            return vllm.MambaSpec(block_size=BLOCK, shapes=((4, 4),), dtypes=(torch.float32,))
        case _:
            layers = {"layer.0": attention(), "layer.1": spec_of(kind.removeprefix("full and "))}
            return vllm.UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=layers)


@pytest.mark.parametrize("kind", ["full", "fp8", "full as window", "full and fp8"])
def test_blocks_of_layers_that_keep_them_can_be_moved(kind: str) -> None:
    assert make_connector(spec=spec_of(kind)).unmovable is None


@pytest.mark.parametrize(
    ("kind", "quantized"), [("full", False), ("state", False), ("fp8", True), ("full and fp8", True)]
)
def test_caches_with_scales_are_told_apart(kind: str, quantized: bool) -> None:
    assert make_connector(spec=spec_of(kind)).quantized is quantized


@pytest.mark.parametrize(
    "kind", ["MLA", "window", "retention", "compressed", "state", "scales per token", "full and MLA"]
)
def test_blocks_of_other_layers_cannot_be_moved(kind: str) -> None:
    """Some are freed while their request runs: a copy would have another request's KV."""
    connector = make_connector(spec=spec_of(kind))
    assert "layers of the kind" in connector.unmovable
    connector.on_new_request(request())
    assert start(connector, [5, 6], 5).changes == []
    connector.register_kv_caches({"layer": torch.zeros(BLOCKS, 2)})
    assert connector.unsupported == connector.unmovable and connector.copier is None


def test_model_without_a_cache_has_no_tables() -> None:
    connector, _ = known(groups=0)
    assert connector.build_connector_meta(Scheduled({"v1": 5}, [New("v1", ())])).changes == []


def test_vllm_keeps_its_hybrid_cache_manager() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma

    assert supports_hma(make_connector())


# --- worker side --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def made() -> Iterator[list[Any]]:
    """The connectors made by `make_worker`, whose copiers end with the test."""
    yield _MADE
    while _MADE:
        _MADE.pop().shutdown()


_MADE: list[Any] = []


def make_worker() -> tuple[Any, torch.Tensor]:
    """A connector with an empty cache of one layer."""
    connector, cache = make_connector(), torch.zeros(BLOCKS, 2, BLOCK, 3)
    connector.register_kv_caches({"layer": cache})
    _MADE.append(connector)
    return connector, cache


def begin(connector: Any, metadata: Any) -> None:
    """The part of a step before it writes to any block."""
    connector.handle_preemptions(metadata)
    connector.bind_connector_metadata(metadata)


def step(connector: Any, **metadata: Any) -> set[str]:
    """One step as vLLM makes it; the requests whose load is over."""
    from migration.kv.connector import StepMetadata

    begin(connector, StepMetadata(**metadata))
    connector.start_load_kv(None)
    sent, received = connector.get_finished(set())
    assert sent is None
    connector.clear_connector_metadata()
    finished: set[str] = received
    return finished


def gathered(connector: Any) -> tuple[int, ...]:
    """The first blocks of r.0 that may be gathered now."""
    with connector.tables.reading("r.0", 0, 1) as (blocks, _):
        return tuple(blocks)


def test_tables_follow_the_changes_of_each_step() -> None:
    connector, _ = make_worker()
    step(connector, changes=[change(5, 5, 6, replace=True)])
    assert gathered(connector) == (5,)
    step(connector, gone=["r.0"], changes=[change(4, 1, replace=True)])
    assert gathered(connector) == (1,)
    step(connector, gone=["r.0", "unknown"])
    with pytest.raises(BlocksGone):
        gathered(connector)


def test_blocks_may_be_gathered_from_the_end_of_the_step_that_fills_them() -> None:
    from migration.kv.connector import StepMetadata

    connector, _ = make_worker()
    begin(connector, StepMetadata([change(5, 5, 6, replace=True)]))
    connector.start_load_kv(None)
    with pytest.raises(BlocksGone):
        gathered(connector)
    connector.get_finished(set())
    assert gathered(connector) == (5,)


def test_blocks_may_not_be_gathered_from_the_beginning_of_the_step_that_may_reuse_them() -> None:
    from migration.kv.connector import StepMetadata

    connector, _ = make_worker()
    step(connector, changes=[change(5, 5, 6, replace=True)])
    begin(connector, StepMetadata(gone=["r.0"]))
    with pytest.raises(BlocksGone):
        gathered(connector)


def test_copier_looks_at_its_calls_after_a_step_that_somebody_waits_for() -> None:
    from migration.kv.connector import StepMetadata

    connector, _ = make_worker()
    woken: list[None] = []
    connector.copier = SimpleNamespace(wake=lambda: woken.append(None), close=connector.copier.close)
    assert connector.tables.computed_beyond("r.0", 0) is None
    step(connector, changes=[TableChange("r.1", 5, [7, 8], replace=True, caught_up=True)])
    assert not woken
    step(connector, changes=[change(5, 5, 6, replace=True)])
    assert len(woken) == 1 and connector.tables.computed_beyond("r.0", 5) is None
    begin(connector, StepMetadata(gone=["r.0"]))
    assert len(woken) == 2


def test_load_is_reported_to_the_scheduler_once_its_blocks_have_arrived() -> None:
    connector, _ = make_worker()
    step(connector, loads=[BlockLoad("m.1", "v1", 0, [9, 4])])
    assert connector.build_connector_worker_meta() is None
    with connector.loads.writing("m.1", 0, 2):
        pass
    assert step(connector) == set()
    assert connector.build_connector_worker_meta().arrived == {"m.1": 1}
    assert connector.build_connector_worker_meta() is None


def test_blocks_of_an_aborted_load_are_given_back() -> None:
    connector, _ = make_worker()
    step(connector, loads=[BlockLoad("m.1", "v1", 0, [9, 4])])
    assert step(connector, ended=["m.1"]) == {"v1"}
    assert step(connector) == set()


def test_held_blocks_may_be_gathered_from_the_end_of_the_step_until_the_hold_ends() -> None:
    """The step may have computed them."""
    from migration.kv.connector import StepMetadata

    connector, _ = make_worker()
    begin(connector, StepMetadata(held=[held_table(5, 9)], loads=[BlockLoad("h", "v1", 2, [7])]))
    assert connector.tables.held("h") is None
    assert connector.get_finished(set()) == (None, set())
    assert connector.tables.held("h") == 2
    with connector.tables.reading("h", 0, 2) as (blocks, _):
        assert list(blocks) == [5, 9]
    assert connector.build_connector_worker_meta() is None, "a hold never arrives"
    assert step(connector, gone=["h"], ended=["h"]) == {"v1"}
    assert connector.tables.held("h") is None and step(connector) == set()


def test_worker_learns_that_a_load_is_in_the_cache() -> None:
    connector, _ = make_worker()
    step(connector, loads=[BlockLoad("m.1", "v1", 0, [9])])
    assert not connector.loads.loaded("m.1")
    step(connector, cached=["m.1"])
    assert connector.loads.loaded("m.1")


def tail_of(connector: Any, *values: float) -> torch.Tensor:
    """A held tail: blocks of these values."""
    blocks = torch.zeros(len(values), 2, BLOCK, 3) + torch.tensor(values).reshape(-1, 1, 1, 1)
    held: torch.Tensor = connector.layout.take(memoryview(bytearray(blocks.numpy().tobytes())))
    return held


def test_tail_is_in_its_blocks_before_the_forward_pass_and_taken_once() -> None:
    from migration.kv.connector import TailLoad

    connector, cache = make_worker()
    connector.tails["m.tail"] = tail_of(connector, 1.0, 2.0, 3.0)
    step(connector, tails=[TailLoad("m.tail", 1, [9, 4])])
    assert cache[9].unique().tolist() == [2.0] and cache[4].unique().tolist() == [3.0]
    assert connector.tails == {} and connector.get_block_ids_with_load_errors() == set()


def test_needless_tail_is_dropped_with_the_next_step() -> None:
    connector, _ = make_worker()
    connector.tails |= {name: tail_of(connector, 1.0) for name in ("m.tail", "n.tail")}
    step(connector, needless=["m.tail", "never held"])
    assert list(connector.tails) == ["n.tail"]


@pytest.mark.parametrize("blocks", [1, 2], ids=["not held", "too few blocks"])
def test_tail_that_cannot_be_copied_fails_its_request_and_not_the_engine(blocks: int) -> None:
    from migration.kv.connector import TailLoad

    connector, _ = make_worker()
    if blocks == 2:
        connector.tails["m.tail"] = tail_of(connector, 1.0)
    step(connector, tails=[TailLoad("m.tail", 0, [9, 4][:blocks])])
    assert connector.get_block_ids_with_load_errors() == {9, 4} - ({4} if blocks == 1 else set())
    assert connector.get_block_ids_with_load_errors() == set()


@pytest.mark.parametrize(
    ("groups", "shape", "reason"),
    [(2, (BLOCKS, 2), "the model has 2 KV cache groups"), (1, (3, 2), "no dimension of (3, 2) counts 16 blocks")],
    ids=["several groups", "no block dimension"],
)
def test_unsupported_cache_has_a_reason_and_no_copier(groups: int, shape: tuple[int, ...], reason: str) -> None:
    connector = make_connector(groups)
    connector.register_kv_caches({"layer": torch.zeros(shape)})
    assert connector.layout is None and connector.copier is None and reason in connector.unsupported
    step(connector, gone=["r.0"])


def test_shutdown_ends_the_copier() -> None:
    connector, _ = make_worker()
    address = connector.copier.address
    connector.shutdown()
    connector.shutdown()
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
        client.connect(address)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_cupy_is_imported_with_the_cache_on_a_gpu_only(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from migration.kv import connector

    monkeypatch.setattr(CacheLayout, "device", torch.device(device))
    monkeypatch.setattr(connector, "Copier", lambda *_: SimpleNamespace(close=lambda: None))
    imported: list[str] = []
    monkeypatch.setattr(importlib, "import_module", imported.append)
    make_worker()
    assert imported == ["cupy"] * (device == "cuda")


def test_a_vllm_without_access_to_its_cache_moves_and_follows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    assert make_connector().unmovable is None
    monkeypatch.delattr(KVConnectorBase_V1, "bind_kv_cache_manager")
    connector = make_connector()
    connector.register_kv_caches({"layer": torch.zeros(BLOCKS, 2, BLOCK, 3)})
    reason = "this version of vLLM gives its connector no manager of the KV cache"
    assert (connector.unsupported, connector.unmirrored, connector.copier) == (reason, reason, None)


def test_nothing_is_admitted_while_requests_exceed_the_size_that_the_pool_is_to_have() -> None:
    from vllm.v1.core.block_pool import BlockPool

    connector, asked = known()
    connector._declared_times = 2.0
    pool = BlockPool(41, enable_caching=True, hash_block_size=BLOCK)
    connector.bind_gpu_block_pool(pool)
    taken = pool.get_new_blocks(12)
    connector._elastic.fit(10)
    assert connector.get_num_new_matched_tokens(asked, 0) == (None, False)
    connector._held["hold"] = 12
    assert connector.get_num_new_matched_tokens(asked, 0) == (0, False), "no request is left that could end"
    connector._held["hold"] = 2
    assert connector.get_num_new_matched_tokens(asked, 0) == (None, False)
    pool.free_blocks(taken[4:])
    connector._elastic.fit(10)
    assert connector._elastic.size == 10 and connector.get_num_new_matched_tokens(asked, 0) == (0, False)
