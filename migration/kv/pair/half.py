"""This worker's half of a pair: the layers that the buddy runs, and their way there and back.

The lower half gives its layers from the top, the upper half from the bottom: what is remote is one piece, and a step
hops once. One layer goes at a time:

    copy      rows of its KV go to the buddy (a thread), while steps run. Each step notes the blocks that it writes.
    give      between two steps: the rows written meanwhile follow; the buddy's answer to the last of them is its
              promise. From then on the layer is remote, and its parameters and KV here go.

and comes back by the same way: `copy` in the other direction, `take_back` once its parameters are loaded. If the copy
fails, nothing has happened. In either direction the KV of one layer is in two places for a while.

A hop that is not answered loses the step: no token is made from it, and from none that follows, until the replica has
had vLLM forget all KV and has loaded all layers again (`be_whole`).
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.forward_context import ForwardContext, get_forward_context

from migration.kv.layout import RowsLost
from migration.kv.pages import give_back
from migration.kv.pair.layers import DecoderLayers
from migration.kv.pair.link import BuddyLink, BuddyLost
from migration.kv.pair.wire import FreeLayer, GetRows, HopCall, LoseRows, MoveRows, PutRows, hop_tensors, rows_of
from migration.kv.parameters import Parameters

log = logging.getLogger(__name__)

COPY_BYTES = 1 << 22
"""The memory of the connection for copies, and so the most bytes between two answers."""


class HopStats:
    """The hops of this worker's steps: their number, their tokens, and the seconds that steps waited for them.

    For `buddy_seconds` of them, the buddy ran these layers, or this worker ran some of the buddy's. `lost_steps` have
    yielded no token.
    """

    def __init__(self) -> None:
        self.hops = 0
        self.tokens = 0
        self.seconds = 0.0
        self.buddy_seconds = 0.0
        self.lost_steps = 0


class Half:
    """One worker's remote layers."""

    def __init__(
        self, layers: DecoderLayers, computing: threading.Lock, width: int, block_size: int, parameters: Parameters
    ) -> None:
        """`computing` is held by the own step, `width` is the hidden size."""
        self._layers = layers
        self._computing = computing
        self._width = width
        self._block_size = block_size
        self._parameters = parameters
        self._steps: BuddyLink | None = None
        self._copies: BuddyLink | None = None
        self._moves: BuddyLink | None = None
        self._moving = threading.Lock()
        """Held by whoever uses the connection of moves: the copier, or a step that has a tail."""
        self._remote = range(0)
        self._written: set[int] | None = None
        """The blocks that steps and moves have written since a copy began; None without one."""
        self._copying: threading.Thread | None = None
        self._copy_failure: str | None = None
        self.lost: str | None = None
        """The reason why steps yield no token; None while they do."""
        self.stats = HopStats()

    @property
    def remote(self) -> range:
        """The layers that the buddy runs."""
        return self._remote

    @property
    def is_copying(self) -> bool:
        """True while the copy under way has rows to go."""
        return self._copying is not None and self._copying.is_alive()

    @property
    def copy_failure(self) -> str | None:
        """The reason why the last copy failed."""
        return self._copy_failure

    def connect(self, address: str, epoch: int, blocks: int, hop_bytes: int, timeout_s: float) -> None:
        """Connect to the buddy's guests. Raises BuddyLost."""
        row = 4 * self._layers.rows(0).shape[1]
        size = max(row, COPY_BYTES // row * row)
        try:
            self._steps = BuddyLink(address, epoch, blocks, hop_bytes, timeout_s)
            self._copies = BuddyLink(address, epoch, blocks, size, timeout_s)
            self._moves = BuddyLink(address, epoch, blocks, size, timeout_s)
        except BuddyLost:
            self.close()
            raise

    def look(self) -> None:
        """Notice a buddy that has ended while no step hops."""
        if self._steps is not None and self._steps.ended:
            self._lose("the buddy's worker is gone")

    @property
    def loses_steps(self) -> bool:
        """True while steps yield no token."""
        return self.lost is not None and bool(self._remote)

    def note_step(self, slots: torch.Tensor) -> None:
        """Note the slots [tokens] of the KV cache that a step has written; those of padding are below zero."""
        if self._written is not None:
            self._written.update((slots[slots >= 0] // self._block_size).unique().tolist())

    # --- layers that come and go ------------------------------------------------------------------------

    def copy(self, layer: int, rows: Sequence[int], back: bool) -> None:
        """Begin to copy rows of a layer to the buddy, or `back` from there."""
        assert not self.is_copying, "one layer at a time"
        self._written, self._copy_failure = set(), None
        self._copying = threading.Thread(
            target=self._copy, args=(layer, list(rows), back), name="mell-pair-copy", daemon=True
        )
        self._copying.start()

    def forget_copy(self, layer: int, back: bool) -> None:
        """Give a copy up: nothing has happened."""
        self._end_copy()
        if not back:
            self._free(layer)

    def give(self, layer: int) -> None:
        """Have a copied layer run at the buddy from the next step on. Raises BuddyLost; it stays here then."""
        written = self._end_copy()
        try:
            self._put(layer, written, final=True)
        except BuddyLost as error:
            self._lose(str(error))
            raise
        with self._computing:
            self._set_remote(sorted({*self._remote, layer}))
            self._parameters.drop(self._layers.modules[layer].modules())
            give_back([self._layers.rows(layer)], 0)

    def take_back(self, layer: int) -> None:
        """Have a layer run here from the next step on: its KV was copied back, and its parameters are loaded.

        Raises BuddyLost; it is remote then as before.
        """
        written = self._end_copy()
        try:
            self._get(layer, written)
        except BuddyLost as error:
            self._lose(str(error))
            raise
        with self._computing:
            self._set_remote([other for other in self._remote if other != layer])
        self._free(layer)

    def load(self) -> None:
        """Load the parameters of all remote layers. Raises any exception of the model's loader; none is loaded then."""
        self._parameters.load()

    def be_whole(self) -> None:
        """All layers are here, with their parameters; no KV counts."""
        self._end_copy()
        with self._computing:
            self._set_remote([])

    def abandon(self) -> None:
        """The buddy is lost, whatever it does: steps yield no token, if layers are remote."""
        self._lose("the pair is given up")
        self.close()

    def close(self) -> None:
        """End the connections."""
        for link in (self._steps, self._copies, self._moves):
            if link is not None:
                link.close()
        self._steps = self._copies = self._moves = None

    # --- copies from and to other replicas --------------------------------------------------------------

    def read_rows(self, layer: int, blocks: Sequence[int], rows: torch.Tensor) -> None:
        """See `RemoteRows`."""
        with self._using_moves() as link:
            for first, part, memory in self._parts(blocks, link):
                link.call(GetRows(layer, part))
                rows[first : first + len(part)] = memory

    def write_rows(self, layer: int, blocks: Sequence[int], rows: torch.Tensor) -> None:
        """See `RemoteRows`."""
        with self._using_moves() as link:
            for first, part, memory in self._parts(blocks, link):
                memory[...] = rows[first : first + len(part)]
                link.call(PutRows(layer, part))

    def note_rows(self, blocks: Sequence[int]) -> None:
        """See `RemoteRows`. What is written during a copy follows it."""
        if self._written is not None:
            self._written.update(blocks)

    @contextmanager
    def _using_moves(self) -> Iterator[BuddyLink]:
        with self._moving:
            try:
                if self.lost is not None or self._moves is None:
                    raise BuddyLost(self.lost or "there is no connection")
                yield self._moves
            except BuddyLost as error:
                self._lose(str(error))
                raise RowsLost(str(error)) from error

    # --- a pool that changes its size -------------------------------------------------------------------

    def move_rows(self, moved: Sequence[tuple[int, int]]) -> None:
        """Blocks have changed their ids: those of remote layers, too."""
        self._of_remote(MoveRows(list(moved)))

    def lose_rows(self, first: int) -> None:
        """The memory of blocks from `first` on is given back: that of remote layers, too."""
        self._of_remote(LoseRows(first))

    def _of_remote(self, call: MoveRows | LoseRows) -> None:
        assert self._written is None, "a pool keeps its size while a layer is copied"
        if self._remote and self.lost is None:
            assert self._copies is not None
            try:
                self._copies.call(call)
            except BuddyLost as error:
                self._lose(str(error))

    # --- inside -----------------------------------------------------------------------------------------

    def _lose(self, reason: str) -> None:
        """The buddy is lost. From now on steps yield no token, if layers are remote."""
        self.lost = self.lost or reason

    def _free(self, layer: int) -> None:
        """Have the buddy free a layer's blocks; it does so anyway once the connection ends."""
        if self._copies is not None:
            try:
                self._copies.call(FreeLayer(layer))
            except BuddyLost as error:
                self._lose(str(error))

    def _end_copy(self) -> list[int]:
        """Wait for the copy under way; the blocks that were written meanwhile."""
        if self._copying is not None:
            self._copying.join()
        self._copying = None
        written, self._written = self._written, None
        return sorted(written or ())

    def _copy(self, layer: int, rows: Sequence[int], back: bool) -> None:
        try:
            with torch.inference_mode():
                if back:
                    self._get(layer, rows)
                else:
                    self._put(layer, rows, final=False)
        except Exception as error:
            if not isinstance(error, BuddyLost):
                log.exception("the copy of a layer failed")
            self._copy_failure = str(error) or repr(error)

    def _put(self, layer: int, rows: Sequence[int], final: bool) -> None:
        link, own = self._linked(), self._layers.rows(layer)
        for _, part, memory in self._parts(rows, link):
            torch.index_select(own, 0, torch.tensor(part), out=memory)
            link.call(PutRows(layer, part))
        if final or not rows:
            link.call(PutRows(layer, [], final))

    def _get(self, layer: int, rows: Sequence[int]) -> None:
        link, own = self._linked(), self._layers.rows(layer)
        for _, part, memory in self._parts(rows, link):
            link.call(GetRows(layer, part))
            own.index_copy_(0, torch.tensor(part), memory)

    def _linked(self) -> BuddyLink:
        if self._copies is None:
            raise BuddyLost("there is no connection")
        return self._copies

    def _parts(self, blocks: Sequence[int], link: BuddyLink) -> Iterator[tuple[int, list[int], torch.Tensor]]:
        """As many blocks at a time as the memory holds: the number of those before, the blocks, and their memory."""
        words = self._layers.rows(0).shape[1]
        most = max(1, len(link.memory) // (4 * words))
        for first in range(0, len(blocks), most):
            part = list(blocks[first : first + most])
            yield first, part, rows_of(link.memory, len(part), words)

    def _set_remote(self, remote: Sequence[int]) -> None:
        """Replace the calls of remote layers: the first one asks the buddy for all, the others pass on."""
        assert not remote or list(remote) == list(range(remote[0], remote[-1] + 1)), "remote layers are one piece"
        for layer in {*self._remote, *remote}:
            module: Any = self._layers.modules[layer]
            if layer not in remote:
                module.__dict__.pop("forward", None)
            elif layer == remote[0]:
                module.forward = self._hop
            else:
                module.forward = _pass_on
        self._remote = range(remote[0], remote[-1] + 1) if remote else range(0)

    def _hop(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Have the buddy run all remote layers. Without an answer the step is lost, and the result means nothing."""
        if self.lost is None:
            context = get_forward_context()
            call, tensors = self._packed(context, positions, hidden_states, residual)
            began = time.perf_counter()
            self._computing.release()
            busy_s, answered = 0.0, began
            try:
                assert self._steps is not None
                busy_s = self._steps.call(call)
            except BuddyLost as error:
                self._lose(str(error))
            finally:
                answered = time.perf_counter()
                self._computing.acquire()
            self.stats.buddy_seconds += busy_s + time.perf_counter() - answered
            self.stats.hops += 1
            self.stats.tokens += len(hidden_states)
            self.stats.seconds += time.perf_counter() - began
            if self.lost is None:
                return tensors.hidden.clone(), tensors.residual.clone()
        return torch.zeros_like(hidden_states), torch.zeros_like(hidden_states)

    def _packed(
        self, context: ForwardContext, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[HopCall, Any]:
        """A step's tensors in the memory of the connection."""
        assert isinstance(context.attn_metadata, dict)
        assert isinstance(context.slot_mapping, dict)
        assert self._steps is not None
        metadata: Any = next(iter(context.attn_metadata.values()))
        slots = next(iter(context.slot_mapping.values()))
        columns = -(-metadata.max_seq_len // self._block_size)
        call = HopCall(
            first=self._remote[0],
            last=self._remote[-1] + 1,
            tokens=len(hidden),
            requests=len(metadata.seq_lens),
            columns=columns,
            has_residual=residual is not None,
            actual=metadata.num_actual_tokens,
            longest_query=metadata.max_query_len,
            longest_context=metadata.max_seq_len,
        )
        tensors = hop_tensors(self._steps.memory, call, self._width, hidden.dtype)
        tensors.positions.copy_(positions)
        tensors.hidden.copy_(hidden)
        if residual is not None:
            tensors.residual.copy_(residual)
        tensors.starts.copy_(metadata.query_start_loc)
        tensors.lengths.copy_(metadata.seq_lens)
        tensors.table.copy_(metadata.block_table[:, :columns])
        tensors.slots.copy_(slots[: len(hidden)])
        return call, tensors


def _pass_on(
    positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The call of a remote layer behind the first: the buddy ran it with that one."""
    return hidden_states, residual
