"""The connector with a tier of host memory under vLLM's own scheduler: no request ever reads another context's KV."""

import random
from collections import Counter
from dataclasses import asdict
from functools import cache
from typing import Any

import pytest

pytestmark = pytest.mark.slow
"""Importing vLLM takes seconds; this file imports it only inside tests."""


@cache
def config(slots: int) -> Any:
    from tests.migration.kv.scheduled import tiered_config

    return tiered_config(slots)


def engine(blocks: int, slots: int, late: bool = False) -> Any:
    from tests.migration.kv.scheduled import HashEngine

    return HashEngine(config(slots), blocks, late)


def run(made: Any, steps: int = 60) -> None:
    for _ in range(steps):
        made.step()


def ask(made: Any, name: str, prompt: list[int], count: int) -> tuple[list[int], int]:
    """A request alone: its output, and the tokens that it found cached."""
    request = made.add(name, prompt, count)
    for _ in range(100):
        made.step()
    assert request.is_finished()
    return made.outputs[name], made.cached[name]


PROMPT = [(7 * index) % 50 for index in range(30)]


def others(made: Any, count: int = 6) -> None:
    """Requests that take all blocks of a pool of 24."""
    for number in range(count):
        prompt = random.Random(f"other {number}").choices(range(50), k=40)
        ask(made, f"other {number} {len(made.outputs)}", prompt, 1)


def test_a_context_that_was_evicted_comes_from_the_tier_with_its_output() -> None:
    from tests.migration.kv.scheduled import expected

    made = engine(24, 200)
    first, cached = ask(made, "first", PROMPT, 12)
    assert (first, cached) == (expected(PROMPT, 12), 0)
    others(made)
    turn = [*PROMPT, *first, 1, 2, 3]
    second, cached = ask(made, "second", turn, 5)
    assert second == expected(turn, 5)
    assert cached == 40, "the 41 tokens of the first turn whose KV was computed, in full blocks"


def spoil(made: Any, slot: int) -> None:
    """Change a bit in a slot of the tier."""
    (stack,) = made.host._host._here()
    stack.tensor.view(len(made.host._pages), made.host.slots, -1)[0, slot, 3] ^= 1


def slot_of(made: Any, prompt: list[int], block: int) -> int:
    """The slot of a block of a prompt."""
    from migration.kv.cache_events import key_name

    request = made.add("named", prompt, 1)
    name = request.block_hashes[block][-8:]
    made.abort("named")
    manager = made.scheduler.connector._manager
    (slot,) = (each.chunk_id for key, each in manager._slots.chunks.items() if key_name(key) == name)
    return int(slot)


@pytest.mark.parametrize(("block", "cached"), [(0, 0), (3, 12), (6, 24)], ids=["first", "middle", "last"])
def test_noise_in_the_tier_is_found_and_the_block_is_computed(block: int, cached: int) -> None:
    from tests.migration.kv.scheduled import expected

    made = engine(24, 200)
    ask(made, "first", PROMPT, 2)
    others(made)
    spoil(made, slot_of(made, PROMPT, block))
    output, found = ask(made, "second", PROMPT, 8)
    assert (output, found) == (expected(PROMPT, 8), cached)
    others(made)
    output, found = ask(made, "third", PROMPT, 8)
    assert (output, found) == (expected(PROMPT, 8), 28), "the block was stored again"
    assert made.scheduler.connector._manager.spoiled == set() and not made.lost


def test_a_preempted_request_gets_its_blocks_from_the_tier() -> None:
    from tests.migration.kv.scheduled import expected

    made = engine(24, 200)
    prompts = {f"r{number}": random.Random(number).choices(range(50), k=30) for number in range(4)}
    requests = [made.add(name, prompt, 40) for name, prompt in prompts.items()]
    loaded, load = list[int](), made.host.load

    def counting(*args: Any) -> int:
        count: int = load(*args)
        loaded.append(count)
        return count

    made.host.load = counting
    run(made, 300)
    assert all(request.is_finished() for request in requests)
    assert {name: made.outputs[name] for name in prompts} == {name: expected(p, 40) for name, p in prompts.items()}
    assert sum(request.num_preemptions for request in requests) > 0 and sum(loaded) > 0


@pytest.mark.parametrize("late", [False, True], ids=["copied in steps", "copied later"])
def test_blocks_of_a_load_are_stored_before_the_copier_writes_to_them(late: bool) -> None:
    """The request has just ended, and its last blocks have not been stored when they are given to the load."""
    from tests.migration.kv.scheduled import expected

    made = engine(14, 200, late)
    made.add("first", PROMPT, 3)
    while "first" in made.scheduler.requests:
        made.step()
    context = random.Random("load").choices(range(50), k=12 * 4 + 1)
    made.add_load("load", context, 0, 12)
    made.step(lambda: [made.copy("load", block) for block in range(12)])
    made.step()
    made.abort("load")
    run(made, 3)
    others(made)
    turn = [*PROMPT, *made.outputs["first"], 5]
    output, found = ask(made, "second", turn, 8)
    assert (output, found) == (expected(turn, 8), 32)


def test_a_reset_empties_the_tier_once_nothing_is_under_way() -> None:
    made = engine(24, 200)
    made.add("first", PROMPT, 2)
    refused = 0
    for _ in range(20):
        made.step()
        refused += not made.scheduler.reset_prefix_cache(reset_connector=True)
    assert refused > 0 and made.scheduler.reset_prefix_cache(reset_connector=True)
    made.step()
    assert made.contents() == {"hbm": [], "dram": []}
    output, found = ask(made, "second", PROMPT, 2)
    assert (output, found) == (made.outputs["first"], 0)


def test_deleted_blocks_are_in_neither_tier() -> None:
    from tests.migration.kv.scheduled import expected

    made = engine(40, 200)
    ask(made, "first", PROMPT, 2)
    name = made.add("named", PROMPT, 1).block_hashes[3][-8:]
    made.abort("named")
    before = made.contents()
    made.add("order", [1], 1, mell_delete={"names": name})
    run(made, 3)
    assert {tier: len(before[tier]) - len(names) for tier, names in made.contents().items()} == {"hbm": 1, "dram": 1}
    assert made.mirror.dram.blocks == len(before["dram"]) - 1
    assert ask(made, "second", PROMPT, 2) == (expected(PROMPT, 2), 12)
    made.add("all", [1], 1, mell_delete={"names": None})
    run(made, 3)
    assert made.contents() == {"hbm": [], "dram": []}


def test_orders_to_the_tier_are_answered() -> None:
    from migration.kv.connector import PinnedBlocks

    made = engine(40, 200)
    ask(made, "first", PROMPT, 2)
    names = b"".join(each[-8:] for each in made.add("named", PROMPT, 1).block_hashes)
    made.abort("named")
    replies: list[Any] = []
    pin: dict[str, Any] = {"mell_pin": asdict(PinnedBlocks("p", names))}
    for order in (pin, {"mell_unpin": "p"}, {"mell_unpin": "p"}):
        asked = made.add(f"order {len(replies)}", [1], 1, **order)
        replies.append(made.scheduler.connector.request_finished_all_groups(asked, ([],))[1])
    assert replies == [{"mell_blocks": 7}, {"mell_blocks": 7}, {"mell_blocks": 0}]


def test_a_cache_of_several_groups_has_no_tier() -> None:
    from types import SimpleNamespace

    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from migration.kv.connector import MellConnector
    from migration.kv.host.tiered import TieredConnector
    from tests.migration.kv.test_connector import attention

    group = SimpleNamespace(kv_cache_spec=attention())
    cache: Any = SimpleNamespace(num_blocks=4, kv_cache_groups=[group, group])
    made = TieredConnector(config(200), KVConnectorRole.WORKER, cache)
    assert type(made) is MellConnector and made.host_blocks == 0


class Traffic:
    """Random requests and loads on an engine, and what goes wrong meanwhile."""

    def __init__(self, seed: int, late: bool) -> None:
        self.draw = random.Random(seed)
        self.made = engine(self.draw.choice((20, 28, 40)), self.draw.choice((3, 20, 60, 400)), late)
        self.store = self.made.host.store
        self.made.host.store = self._store
        self.happened = Counter[str]()
        self.prompts: dict[str, tuple[list[int], int]] = {}
        """The requests that are not aborted, with the numbers of their output tokens."""
        self.loads: dict[str, int] = {}
        """The loads under way, with the numbers of their blocks."""

    def _store(self, *args: Any) -> None:
        if self.draw.random() < 0.05:
            self.happened["failed store"] += 1
            raise MemoryError
        self.store(*args)

    def step(self, turn: int) -> None:
        self._requests(turn)
        self._loads(turn)
        if self.draw.random() < 0.1:
            spoil(self.made, self.draw.randrange(self.made.host.slots))
        scheduler = self.made.scheduler
        if not scheduler.requests and self.draw.random() < 0.3:
            self.happened["reset"] += scheduler.reset_prefix_cache(reset_connector=True)
        self.made.step(self._copies)
        if self.draw.random() < 0.3:
            self._copies()
        if self.draw.random() < 0.1:
            scheduler.connector._contents_wanted = True

    def _requests(self, turn: int) -> None:
        from tests.migration.kv.scheduled import draw_prompt, expected

        draw, running = self.draw, sorted(name for name in self.prompts if name in self.made.scheduler.requests)
        if len(running) < 5 and draw.random() < 0.5:
            prompt, count = draw_prompt(draw), draw.randrange(1, 30)
            if self.prompts and draw.random() < 0.4:
                before, length = self.prompts[draw.choice(sorted(self.prompts))]
                prompt = [*before, *expected(before, length), turn % 50][:40]
            self.prompts[f"r{turn}"] = (prompt, count)
            self.made.add(f"r{turn}", prompt, count)
        if running and draw.random() < 0.05:
            self.made.abort(gone := draw.choice(running))
            del self.prompts[gone]

    def _loads(self, turn: int) -> None:
        from tests.migration.kv.scheduled import draw_prompt

        draw, made = self.draw, self.made
        if draw.random() < 0.1:
            context = draw_prompt(draw)
            last = (len(context) - 1) // 4
            made.add_load(f"l{turn}", context, draw.choice((0, 0, last // 2)), last)
            self.loads[f"l{turn}"] = last
        for name in list(self.loads):
            loaded = made.worker.loads.loaded(name)
            if loaded or name not in made.scheduler.requests or draw.random() < 0.02:
                self.happened["loaded"] += loaded
                self.end_load(name)

    def end_load(self, name: str) -> None:
        self.made.abort(name)
        self.made.worker.loads.forget(name)
        del self.loads[name]

    def _copies(self) -> None:
        for name, last in self.loads.items():
            for block in range(last):
                if self.draw.random() < 0.5:
                    self.made.copy(name, block)


@pytest.mark.parametrize("late", [False, True], ids=["copied in steps", "copied later"])
@pytest.mark.parametrize("seed", range(5))
def test_no_request_reads_another_context(seed: int, late: bool) -> None:
    """Requests that share beginnings, preemptions, aborts, loads, noise, failed stores, a small tier, and resets."""
    from tests.migration.kv.scheduled import expected

    traffic = Traffic(seed, late)
    for turn in range(400):
        traffic.step(turn)
    for name in list(traffic.loads):
        traffic.end_load(name)
    made, prompts = traffic.made, traffic.prompts
    run(made, 200)
    made.scheduler.connector._contents_wanted = True
    made.add("last", [1], 1)
    run(made, 5)
    assert not made.lost and not made.scheduler.requests
    assert {name: made.outputs[name] for name in prompts} == {n: expected(*each) for n, each in prompts.items()}
    assert len(prompts) > 20 and traffic.happened["loaded"], traffic.happened
    mirror, kept = made.mirror, made.contents()
    assert mirror.exact and mirror.resyncs == {"start": 1}, "events alone explain every difference"
    assert (sorted(mirror.hbm.counts), sorted(mirror.dram.counts)) == (sorted(set(kept["hbm"])), kept["dram"])
    assert made.scheduler.connector._manager.spoiled == set()
