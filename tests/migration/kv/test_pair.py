"""The layers of one worker that run at another one: their KV rows, on both sides of a real connection."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import nn

if TYPE_CHECKING:
    from migration.kv.layout import CacheLayout

pytestmark = pytest.mark.slow
"""Importing vLLM takes seconds; this file imports it only inside tests."""

BLOCKS, WORDS, COUNT = 40, 6, 4


class Block(nn.Module):
    """A decoder layer."""

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return hidden_states, residual


class Layers:
    """In place of `DecoderLayers`: modules with caches of float32, and the layers whose parameters were dropped."""

    def __init__(self) -> None:
        self.modules = [Block() for _ in range(COUNT)]
        self.caches = [torch.rand(BLOCKS, 1, WORDS) for _ in range(COUNT)]
        self.names = [f"layers.{i}" for i in range(COUNT)]
        self.dropped = 0

    def cache(self, layer: int) -> torch.Tensor:
        return self.caches[layer]

    def rows(self, layer: int) -> torch.Tensor:
        return self.caches[layer].view(BLOCKS, -1).view(torch.int32)

    def drop(self, modules: Any) -> None:
        self.dropped += 1

    def layout(self) -> "CacheLayout":
        from migration.kv.layout import CacheLayout

        return CacheLayout(dict(zip(self.names, self.caches, strict=True)), BLOCKS)


class Two:
    """A half with its layers, and the guests of its buddy."""

    def __init__(self, epoch: int = 1, timeout_s: float = 5.0) -> None:
        from migration.kv.pair.guests import Guests
        from migration.kv.pair.half import Half

        self.layers = Layers()
        nothing: Any = None
        layers = cast(Any, self.layers)
        self.guests = Guests(epoch, nothing, nothing, cast(Any, Layers()), threading.Lock())
        self.half = Half(layers, threading.Lock(), width=8, block_size=4, parameters=layers)
        self.half.connect(self.guests.address, 1, BLOCKS, 1 << 12, timeout_s)

    def copied(self) -> None:
        until(lambda: not self.half.is_copying)


@pytest.fixture
def two() -> Iterator[Two]:
    made = Two()
    yield made
    made.half.close()
    made.guests.close()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_layer_goes_and_comes_back_with_the_rows_that_steps_write_meanwhile(two: Two) -> None:
    half, layers = two.half, two.layers
    want = layers.rows(3).clone()
    half.copy(3, range(1, BLOCKS), back=False)
    two.copied()
    # A step writes behind the copy; a slot below zero is padding.
    layers.caches[3][7] += 1
    want[7] = layers.rows(3)[7]
    half.note_step(torch.tensor([7 * 4 + 1, 7 * 4 + 2, -1]))
    half.give(3)
    assert list(half.remote) == [3]
    assert layers.dropped == 1
    assert two.guests.layers == 1
    layers.caches[3].zero_()
    half.copy(3, range(1, BLOCKS), back=True)
    two.copied()
    layers.caches[3][9] = 0.0
    half.note_step(torch.tensor([9 * 4]))
    half.take_back(3)
    assert torch.equal(layers.rows(3)[1:], want[1:])
    assert not half.remote
    assert two.guests.layers == 0
    assert half.lost is None


def test_the_first_remote_layer_asks_for_all_and_the_others_pass_on(two: Two) -> None:
    half, modules = two.half, two.layers.modules
    hidden = torch.ones(2, 8)
    for layer in (3, 2):
        half.copy(layer, [1], back=False)
        half.give(layer)
    assert modules[2].forward == half._hop
    assert modules[3](None, hidden, hidden)[0] is hidden
    assert "forward" not in modules[1].__dict__
    half.copy(2, [1], back=True)
    half.take_back(2)
    assert modules[3].forward == half._hop
    assert "forward" not in modules[2].__dict__
    with pytest.raises(AssertionError, match="one piece"):
        half._set_remote([1, 3])


def test_rows_of_remote_layers_follow_a_pool_that_changes_its_size(two: Two) -> None:
    half, layers = two.half, two.layers
    half.copy(3, range(BLOCKS), back=False)
    half.give(3)
    want = layers.rows(3).clone()
    half.move_rows([(30, 5), (31, 6)])
    half.lose_rows(20)
    half.copy(3, range(1, 20), back=True)
    half.take_back(3)
    assert torch.equal(layers.rows(3)[5:7], want[30:32])
    assert torch.equal(layers.rows(3)[10:20], want[10:20])


def split(two: Two) -> "CacheLayout":
    """The layout of the half, some layers of which may be at its buddy's."""
    layout = two.layers.layout()
    layout.elsewhere = two.half
    return layout


def given(two: Two, layers: Sequence[int]) -> None:
    for layer in layers:
        two.half.copy(layer, range(BLOCKS), back=False)
        two.half.give(layer)
        two.layers.caches[layer].zero_()


@pytest.mark.parametrize("remote", [(3, 2), (0,)], ids=["the last layers", "the first"])
def test_whole_blocks_are_copied_from_and_to_other_replicas(two: Two, remote: Sequence[int]) -> None:
    layers, whole = two.layers, Layers()
    layout, others = split(two), whole.layout()
    want = [cache.clone() for cache in layers.caches]
    given(two, remote)
    staged = memoryview(bytearray(3 * layout.block_bytes))
    layout.gather([5, 0, 39], staged)
    others.scatter([1, 2], 3, 1, staged)
    for cache, ours in zip(whole.caches, want, strict=True):
        assert torch.equal(cache[1:3], ours[[0, 39]])

    others.gather([20, 21, 22], staged)
    # What a step makes in inference mode can still be written between two steps.
    layout = split(two)
    with torch.inference_mode():
        layout.scatter([30, 31], 3, 1, staged)
    layout.move([(32, 33)])
    assert not any(layers.caches[layer].any() for layer in remote), "their memory here is given back"
    for layer in reversed(remote):
        two.half.copy(layer, range(BLOCKS), back=True)
        two.half.take_back(layer)
    for cache, ours, theirs in zip(layers.caches, want, whole.caches, strict=True):
        assert torch.equal(cache[30:32], theirs[21:23])
        assert torch.equal(cache[:30], ours[:30])


@pytest.mark.parametrize("back", [False, True])
def test_a_block_that_arrives_during_the_copy_of_a_layer_goes_along(two: Two, back: bool) -> None:
    layout = split(two)
    if back:
        given(two, [3])
    two.half.copy(3, range(BLOCKS), back)
    two.copied()
    staged = memoryview(bytearray(layout.block_bytes))
    Layers().layout().gather([7], staged)
    layout.scatter([9], 1, 0, staged)
    two.half.take_back(3) if back else two.half.give(3)
    layout.gather([9], found := memoryview(bytearray(layout.block_bytes)))
    assert found == staged


def test_nothing_is_copied_from_or_to_a_worker_whose_buddy_is_lost(two: Two) -> None:
    from migration.kv.layout import RowsLost

    layout = split(two)
    given(two, [3])
    two.guests.close()
    staged = memoryview(bytearray(layout.block_bytes))
    with pytest.raises(RowsLost):
        layout.gather([5], staged)
    with pytest.raises(RowsLost):
        layout.scatter([5], 1, 0, staged)
    assert two.half.loses_steps


def test_a_copy_that_fails_is_no_copy(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(two.half, "_put", fail)
    two.half.copy(3, [1], back=False)
    two.copied()
    assert two.half.copy_failure == "unforeseen"


def test_a_copy_that_is_given_up_leaves_nothing(two: Two) -> None:
    two.half.copy(3, range(1, BLOCKS), back=False)
    two.half.forget_copy(3, back=False)
    assert two.guests.layers == 0
    assert not two.half.remote


def test_a_buddy_that_ends_is_noticed_and_a_layer_that_was_not_given_stays(two: Two) -> None:
    from migration.kv.pair.link import BuddyLost

    half = two.half
    half.copy(3, [1], back=False)
    half.give(3)
    half.copy(2, [1], back=False)
    two.copied()
    two.guests.close()
    with pytest.raises(BuddyLost):
        half.give(2)
    assert list(half.remote) == [3]
    assert half.loses_steps
    half.be_whole()
    assert not half.loses_steps


def test_guests_end_with_the_first_connection_of_their_buddy(two: Two) -> None:
    two.half.copy(3, [1], back=False)
    two.half.give(3)
    two.half.close()
    until(lambda: two.guests.ended is not None and two.guests.layers == 0)


def test_a_buddy_of_another_epoch_is_refused() -> None:
    from migration.kv.pair.link import BuddyLost

    with pytest.raises(BuddyLost, match="no pair of epoch 1"):
        Two(epoch=2)


def test_a_buddy_that_hangs_is_lost() -> None:
    from migration.kv.pair.link import BuddyLink, BuddyLost

    address = f"\0mell-test-{time.monotonic_ns()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen()
        with pytest.raises(BuddyLost, match="does not answer"):
            BuddyLink(address, 1, BLOCKS, 64, timeout_s=0.05)


class Model(nn.Module):
    """A model with a list of layers, each with a cache of its own."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.names = [f"layers.{i}.attn" for i in range(len(layers))]
        self.attention: dict[str, Any] = {name: Attention() for name in self.names}

    def forward(
        self, input_ids: Any, positions: Any, intermediate_tensors: Any, inputs_embeds: Any, **more: Any
    ) -> Any:
        raise NotImplementedError


class Attention:
    def __init__(self) -> None:
        self.kv_cache = torch.zeros(2, 2)


def why_unpairable(model: Model, names: list[str] | None = None) -> str | None:
    from migration.kv.pair.layers import DecoderLayers, Unpairable

    names = model.names if names is None else names
    try:
        assert len(DecoderLayers(model, {name: model.attention.get(name) for name in names}, names)) == 2
    except Unpairable as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "arguments",
    [
        "self, hidden_states, residual",
        "self, positions, hidden_states, residual, x",
        # The model may pass them on, and a hop does not have them.
        "self, positions, hidden_states, residual, x=None",
        "self, positions, hidden_states, residual, **more",
    ],
)
def test_layers_with_other_arguments_cannot_be_paired(arguments: str) -> None:
    space: dict[str, Any] = {}
    exec(f"def forward({arguments}): ...", space)
    odd = type("Odd", (nn.Module,), {"forward": space["forward"]})
    assert "other arguments" in (why_unpairable(Model(odd(), odd())) or "")


def test_layers_are_one_list_with_a_cache_each() -> None:
    model = Model(Block(), Block())
    names = model.names
    assert why_unpairable(model) is None
    for odd in (names[:1], [*names, "other.0.attn"], ["layers.attn"]):
        assert why_unpairable(model, odd)
    assert "not in a list" in (why_unpairable(model, ["model.layers.0.attn", "model.layers.1.attn"]) or "")
    assert "one layer" in (why_unpairable(Model(Block())) or "")
    model.attention[names[1]].kv_cache = torch.zeros(2, 3)
    assert "not alike" in (why_unpairable(model) or "")
    model.attention[names[1]] = model.attention[names[0]]
    assert "share a KV cache" in (why_unpairable(model) or "")


def test_layers_between_which_the_model_adds_something_cannot_be_paired() -> None:
    class Deep(Model):
        def forward(self, input_ids: Any, positions: Any, deepstack_input_embeds: Any = None) -> Any:  # type: ignore[override]
            raise NotImplementedError

    assert "deepstack_input_embeds" in (why_unpairable(Deep(Block(), Block())) or "")
