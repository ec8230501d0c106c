"""Both halves of the vLLM connector, driven with the calls that vLLM makes, without an engine."""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from migration.kv.layout import CacheLayout
from migration.kv.staging import HEADER, HostSegment
from migration.protocol.messages import SlotRef

pytestmark = pytest.mark.slow
"""Importing vLLM takes seconds; this file imports it only inside tests."""

BLOCK, BLOCKS = 4, 16
SLOT = SlotRef("/proc/1/fd/1", 0, 7)


@dataclass
class Request:
    """vLLM's Request, reduced to the fields that the connector uses."""

    request_id: str = "v1"
    kv_transfer_params: dict[str, Any] | None = None
    prompt_token_ids: list[int] = field(default_factory=lambda: [1, 2, 3, 4])
    num_prompt_tokens: int = 4
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


def make_connector(groups: int = 1) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from migration.kv.connector import MellConnector

    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=BLOCK), kv_transfer_config=SimpleNamespace())
    cache = SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[None] * groups)
    return MellConnector(config, KVConnectorRole.WORKER, cache)


def request(first: int | None = None, last: int = 0, key: str = "r.0", id: str = "v1", slot: SlotRef = SLOT) -> Request:
    """A request, with staged blocks [first, last) if `first` is given."""
    from migration.kv.connector import StagedBlocks

    load = {} if first is None else {"mell_load": StagedBlocks(first, last, slot).to_params()}
    return Request(id, {"mell_key": key, **load})


def known(first: int | None = None, last: int = 0, groups: int = 1) -> tuple[Any, Request]:
    """A connector, and a request added to it."""
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


def change(computed: int, *blocks: int, replace: bool = False) -> Any:
    from migration.kv.connector import TableChange

    return TableChange("r.0", computed, list(blocks), replace)


# --- scheduler side: tokens covered by staged blocks --------------------------------------------------


def test_staged_blocks_round_trip_through_request_parameters() -> None:
    from migration.kv.connector import StagedBlocks

    staged = StagedBlocks(2, 5, SlotRef("/proc/9/fd/3", 4096, 2**62))
    assert StagedBlocks.from_params(staged.to_params()) == staged


@pytest.mark.parametrize(
    ("first", "last", "computed", "matched"),
    [
        (0, 3, 0, 12),
        (0, 3, 4, 8),
        (2, 3, 8, 4),
        (0, 3, 12, 0),
        (0, 3, 16, 0),
        (2, 3, 4, 0),
        (2, 3, 0, 0),
    ],
    ids=[
        "the whole context, if nothing is cached",
        "the tokens beyond the cache",
        "blocks that continue the cache",
        "nothing, if the cache has as much",
        "nothing, if the cache has more",
        "nothing, if there is a gap before them",
        "nothing, if the chunks before them were evicted",
    ],
)
def test_staged_blocks_cover(first: int, last: int, computed: int, matched: int) -> None:
    connector, asked = known(first, last)
    assert connector.get_num_new_matched_tokens(asked, computed) == (matched, False)


@pytest.mark.parametrize(
    "params", [None, {}, {"mell_key": "r.0"}], ids=["no parameters", "no Mell parameters", "only a key"]
)
def test_request_without_staged_blocks_matches_nothing(params: dict[str, Any] | None) -> None:
    connector, asked = make_connector(), Request("v1", params)
    connector.on_new_request(asked)
    assert connector.get_num_new_matched_tokens(asked, 0) == (0, False)


def test_match_can_be_repeated_for_a_request_that_was_not_scheduled() -> None:
    connector, asked = known(0, 3)
    assert connector.get_num_new_matched_tokens(asked, 0) == (12, False)
    assert connector.get_num_new_matched_tokens(asked, 4) == (8, False)


def test_blocks_are_loaded_once() -> None:
    connector, asked = known(0, 2)
    connector.update_state_after_alloc(asked, Allocated([5, 6, 7]), 8)
    assert connector.get_num_new_matched_tokens(asked, 0) == (0, False)
    assert len(start(connector, [5, 6, 7], 9).loads) == 1
    assert connector.build_connector_meta(Scheduled()).loads == []


@pytest.mark.parametrize(
    ("first", "tokens", "skip", "blocks"),
    [(0, 12, 0, [5, 6, 7]), (0, 4, 2, [7]), (1, 8, 0, [6, 7])],
    ids=["all", "those beyond the cache", "those of a later chunk"],
)
def test_staged_blocks_are_loaded_at_their_index_in_the_table(
    first: int, tokens: int, skip: int, blocks: list[int]
) -> None:
    connector, asked = known(first, 3)
    connector.update_state_after_alloc(asked, Allocated([5, 6, 7, 8]), tokens)
    (load,) = start(connector, [5, 6, 7, 8], 13).loads
    assert (load.skip, load.blocks, load.staged.first) == (skip, blocks, first)


def test_request_without_a_match_never_loads() -> None:
    connector, asked = known(0, 3)
    connector.update_state_after_alloc(asked, Allocated([5, 6]), 0)
    assert start(connector, [5, 6], 8).loads == []
    assert connector.get_num_new_matched_tokens(asked, 0) == (0, False)


# --- scheduler side: output so far --------------------------------------------------------------------


def begin(outputs: int, seed: int | None = None, whole: list[int] | None = None) -> tuple[Request, New, Any]:
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
    asked, new, to_restore = begin(outputs, seed)
    cut = 4 - outputs
    assert (asked.prompt_token_ids, asked._output_token_ids) == ([1, 2, 3, 4][:cut], [1, 2, 3, 4][cut:])
    assert asked.num_prompt_tokens == cut
    assert to_restore == restored
    assert new.prompt_token_ids == [1, 2, 3, 4], "V1 builds its batch from this"


def test_model_runner_v2_gets_the_split_prompt_and_restores_nothing() -> None:
    _, new, to_restore = begin(3, 7, whole=[1, 2, 3, 4])
    assert (new.prompt_token_ids, new.prefill_token_ids, to_restore) == ([1], [1, 2, 3, 4], {})


class Grammar:
    """Accepts tokens up to a limit."""

    def __init__(self, limit: int = 100) -> None:
        self.limit = limit
        self.accepted: list[int] = []

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self.accepted += tokens
        return max(tokens) < self.limit


def constrained(outputs: int, compiling: "Future[Grammar]") -> Request:
    asked = request()
    asked.kv_transfer_params = {"mell_key": "r.0", "mell_output": outputs}
    asked.structured_output_request = SimpleNamespace(_grammar=compiling, grammar=compiling)
    make_connector().on_new_request(asked)
    return asked


def test_grammar_is_ready_after_compilation_and_has_accepted_the_output() -> None:
    compiling: Future[Grammar] = Future()
    asked, grammar = constrained(2, compiling), Grammar()
    ready = asked.structured_output_request.grammar  # type: ignore[union-attr]
    assert not ready.done()
    compiling.set_result(grammar)
    assert ready.result(0) is grammar and grammar.accepted == [3, 4]


@pytest.mark.parametrize("fault", ["compile", "accept"])
def test_failing_grammar_fails_only_its_own_request(fault: str) -> None:
    compiling: Future[Grammar] = Future()
    asked = constrained(2, compiling)
    if fault == "compile":
        compiling.set_exception(ValueError("no grammar"))
    else:
        compiling.set_result(Grammar(limit=4))
    with pytest.raises(ValueError, match="grammar"):
        asked.structured_output_request.grammar.result(0)  # type: ignore[union-attr]


def test_grammar_of_a_request_without_output_is_unchanged() -> None:
    compiling: Future[Grammar] = Future()
    assert constrained(0, compiling).structured_output_request.grammar is compiling  # type: ignore[union-attr]


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
    connector, asked = known(0, 3)
    assert connector.build_connector_meta(Scheduled(finished_req_ids=frozenset({"v1"}))).gone == ["r.0"]
    assert connector.get_num_new_matched_tokens(asked, 0) == (0, False)
    assert connector.build_connector_meta(Scheduled(finished_req_ids=frozenset({"v1"}))).gone == []


def test_model_with_several_cache_groups_has_no_tables() -> None:
    connector, _ = known(groups=2)
    assert start(connector, [5, 6], 5).changes == []


# --- worker side --------------------------------------------------------------------------------------


@pytest.fixture
def segment() -> Iterator[HostSegment]:
    with HostSegment.create(1 << 16) as made:
        yield made


def make_worker(segment: HostSegment | None = None, staged: int = 3) -> tuple[Any, torch.Tensor]:
    """A connector with an empty cache of one layer; block i of `segment`'s slot holds i + 1, under ticket 7."""
    connector, cache = make_connector(), torch.zeros(BLOCKS, 2, BLOCK, 3)
    connector.register_kv_caches({"layer": cache})
    if segment is not None:
        full = torch.zeros(BLOCKS, 2, BLOCK, 3) + torch.arange(1, BLOCKS + 1).reshape(-1, 1, 1, 1)
        layout = CacheLayout({"layer": full}, BLOCKS)
        layout.gather(range(staged), segment.view(HEADER, staged * layout.block_bytes))
        segment.stamp(0, 7)
    return connector, cache


def step(connector: Any, *, changes: Sequence[Any] = (), gone: Sequence[str] = (), loads: Sequence[Any] = ()) -> None:
    from migration.kv.connector import StepMetadata

    connector.bind_connector_metadata(StepMetadata(list(changes), list(gone), list(loads)))
    connector.start_load_kv(None)
    connector.clear_connector_metadata()


def load(segment: HostSegment, *blocks: int, skip: int = 0, staged: int = 3, ticket: int = 7) -> Any:
    from migration.kv.connector import BlockLoad, StagedBlocks

    return BlockLoad(StagedBlocks(0, staged, SlotRef(segment.path, 0, ticket)), skip, list(blocks))


def held(cache: torch.Tensor) -> dict[int, float]:
    """The content of each non-empty block."""
    return {i: block.unique().item() for i, block in enumerate(cache) if block.any()}


def test_tables_follow_the_changes_of_each_step() -> None:
    connector, _ = make_worker()
    step(connector, changes=[change(5, 5, 6, replace=True)])
    step(connector, changes=[change(9, 7)])
    table = connector.tables["r.0"]
    assert (table.computed, table.blocks) == (9, [5, 6, 7])
    step(connector, changes=[change(4, 1, replace=True)])
    assert connector.tables["r.0"].blocks == [1]
    step(connector, gone=["r.0", "unknown"])
    assert connector.tables == {}


def test_request_preempted_and_resumed_in_one_step_has_its_new_table() -> None:
    connector, _ = make_worker()
    step(connector, changes=[change(5, 5, 6, replace=True)])
    step(connector, gone=["r.0"], changes=[change(2, 9, replace=True)])
    assert connector.tables["r.0"].blocks == [9]


def test_staged_blocks_are_loaded(segment: HostSegment) -> None:
    connector, cache = make_worker(segment)
    step(connector, loads=[load(segment, 9, 4, skip=1)])
    assert held(cache) == {9: 2.0, 4: 3.0}
    assert connector.blocks_loaded == 2 and connector.get_block_ids_with_load_errors() == set()


@pytest.mark.parametrize(
    ("knobs", "blocks"),
    [
        ({"ticket": 8}, [9, 4]),
        ({"staged": 2_000}, [9, 4]),
        ({"skip": 2}, [9, 4]),
        ({}, [9, BLOCKS]),
    ],
    ids=["with another ticket", "longer than the segment", "beyond the staged blocks", "into blocks that do not exist"],
)
def test_failed_load_is_reported_once_and_raises_nothing(segment: HostSegment, knobs: Any, blocks: list[int]) -> None:
    connector, cache = make_worker(segment)
    step(connector, loads=[load(segment, *blocks, **knobs)])
    assert connector.get_block_ids_with_load_errors() == set(blocks)
    assert connector.get_block_ids_with_load_errors() == set()
    assert held(cache) == {} and connector.blocks_loaded == 0


@pytest.mark.parametrize(("ticket", "reverted"), [(7, False), (8, True)], ids=["loaded", "failed"])
def test_step_after_a_failed_load_reverts_random_draws(segment: HostSegment, ticket: int, reverted: bool) -> None:
    """vLLM discards the samples of the step in which the load failed."""
    from migration.kv.history import SeededGenerator

    connector, _ = make_worker(segment)
    generator = SeededGenerator(3, [])
    connector.runner = SimpleNamespace(requests={"v1": SimpleNamespace(generator=generator)})
    step(connector, loads=[load(segment, 9, ticket=ticket)])
    connector.get_block_ids_with_load_errors()
    first = torch.rand(1, generator=generator)
    step(connector)
    assert (torch.rand(1, generator=generator) == first) == reverted
    second = torch.rand(1, generator=generator)
    step(connector)
    assert torch.rand(1, generator=generator) != second


def test_load_from_a_dead_process_is_reported_as_failed() -> None:
    connector, _ = make_worker()
    segment = SimpleNamespace(path="/proc/1/fd/999999")
    step(connector, loads=[load(segment, 2)])  # type: ignore[arg-type]
    assert connector.get_block_ids_with_load_errors() == {2}


def test_load_outside_the_segment_is_reported_as_failed(segment: HostSegment) -> None:
    from migration.kv.connector import BlockLoad, StagedBlocks

    connector, _ = make_worker(segment)
    step(connector, loads=[BlockLoad(StagedBlocks(0, 1, SlotRef(segment.path, 1 << 20, 7)), 0, [2])])
    assert connector.get_block_ids_with_load_errors() == {2}


def test_failed_load_does_not_stop_the_others(segment: HostSegment) -> None:
    connector, cache = make_worker(segment)
    step(connector, loads=[load(segment, 1, ticket=8), load(segment, 2)])
    assert held(cache) == {2: 1.0} and connector.get_block_ids_with_load_errors() == {1}


@pytest.mark.parametrize(
    ("groups", "shape", "reason"),
    [(2, (BLOCKS, 2), "the model has 2 KV cache groups"), (1, (3, 2), "no dimension of (3, 2) counts 16 blocks")],
    ids=["several groups", "no block dimension"],
)
def test_unsupported_cache_has_a_reason_and_its_loads_fail(
    groups: int, shape: tuple[int, ...], reason: str, segment: HostSegment
) -> None:
    connector = make_connector(groups)
    connector.register_kv_caches({"layer": torch.zeros(shape)})
    assert connector.layout is None and reason in connector.unsupported
    step(connector, loads=[load(segment, 1)])
    assert connector.get_block_ids_with_load_errors() == {1}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_cupy_is_imported_with_the_cache_on_a_gpu_only(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheLayout, "device", torch.device(device))
    imported: list[str] = []
    monkeypatch.setattr(importlib, "import_module", imported.append)
    make_worker()
    assert imported == ["cupy"] * (device == "cuda")
