"""The buddy's requests in this worker: the KV of their layers that run here, and the steps through these layers.

A thread per connection of the buddy. A step takes `computing`, the lock of whoever computes with this worker's layers:
vLLM's forward context, the attention modules and the kernels' scratch memory are there once. The own step gives it away
while it waits for the buddy; that is the pipeline.

The guests' KV is in memory of its own, under the block ids of the buddy's pool. It belongs to the buddy's connections
and is freed with the first that ends: then the buddy has ended, or given the pair up, and never asks for it again.
"""

import contextlib
import logging
import os
import secrets
import socket
import struct
import threading
import time
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import create_forward_context, override_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from migration.kv.pages import give_back, untouched
from migration.kv.pair.layers import DecoderLayers, as_rows
from migration.kv.pair.wire import (
    Answer,
    Call,
    FreeLayer,
    GetRows,
    Hello,
    HopCall,
    LoseRows,
    MoveRows,
    PutRows,
    hop_tensors,
    receive_call,
    rows_of,
    send,
)
from migration.kv.staging import HostSegment
from migration.protocol.errors import MigrationError, TransferFailed

log = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")
"""SO_PEERCRED: process, user and group of the other end."""


class Guests:
    """Serves the buddy of one pair. `address` is the socket's name."""

    def __init__(
        self, epoch: int, runner: Any, config: VllmConfig, layers: DecoderLayers, computing: threading.Lock
    ) -> None:
        """Connections of another `epoch` are refused."""
        self.address = f"\0mell-pair-{os.getpid()}-{secrets.token_hex(8)}"
        self.hops = 0
        self.ended: str | None = None
        """The reason why no guest is served any more; None while they are, or before the first."""
        self._epoch = epoch
        self._runner = runner
        self._config = config
        self._layers = layers
        self._computing = computing
        self._caches: dict[int, torch.Tensor] = {}
        self._threads = torch.get_num_threads()
        self._connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.address)
        self._listener.listen()
        threading.Thread(target=self._accept, name="mell-guests", daemon=True).start()

    def close(self, reason: str = "the pair is over") -> None:
        """Serve nobody any more, and free the guests' KV."""
        if self.ended is None:
            self.ended = reason
        for open_socket in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)
            open_socket.close()
        with self._computing:
            self._caches.clear()

    @property
    def layers(self) -> int:
        """The number of layers with KV of guests."""
        return len(self._caches)

    def _accept(self) -> None:
        while self.ended is None:
            try:
                accepted, _ = self._listener.accept()
                _, user, _ = _CREDENTIALS.unpack(
                    accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                )
            except OSError:
                return
            if user != os.getuid():
                log.warning("user %d may not run layers here", user)
                accepted.close()
                continue
            self._connections.append(accepted)
            threading.Thread(target=self._serve, args=(accepted,), name="mell-guest", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        # The kernels divide their work by it: another number would sum in another order.
        # vLLM's CPU worker has replaced torch's own function of that name by a warning.
        torch._C.set_num_threads(self._threads)
        segment: HostSegment | None = None
        hello: Hello | None = None
        reason = "the buddy has closed its connection"
        try:
            with torch.inference_mode():
                while (call := receive_call(connection)) is not None:
                    began = time.perf_counter()
                    try:
                        if isinstance(call, Hello):
                            hello, segment = self._meet(call)
                        elif segment is None or hello is None:
                            raise TransferFailed("the first call is no Hello")
                        else:
                            self._do(call, hello, segment.view(0, segment.size))
                        answer = Answer(seconds=time.perf_counter() - began)
                    except Exception as error:
                        # Nobody else sees it: the buddy loses its step, and gives the pair up.
                        if not isinstance(error, MigrationError):
                            log.exception("a call of the buddy failed")
                        answer = Answer(f"{type(error).__name__}: {error}")
                    send(connection, answer)
        except (OSError, ValueError) as error:
            reason = str(error)
        finally:
            if hello is not None:
                self.close(reason)
            connection.close()

    def _meet(self, hello: Hello) -> tuple[Hello, HostSegment]:
        if hello.epoch != self._epoch or self.ended is not None:
            raise TransferFailed(f"this is no pair of epoch {hello.epoch}")
        return hello, HostSegment.open(hello.segment)

    def _do(self, call: Call, hello: Hello, memory: memoryview) -> None:
        match call:
            case HopCall():
                self._hop(call, memory)
            case PutRows():
                rows = self._rows(call.layer, hello.blocks)
                if call.rows:
                    index = torch.tensor(call.rows)
                    rows.index_copy_(0, index, rows_of(memory, len(call.rows), rows.shape[1]))
            case GetRows():
                rows = as_rows(self._caches[call.layer])
                torch.index_select(rows, 0, torch.tensor(call.rows), out=rows_of(memory, len(call.rows), rows.shape[1]))
            case MoveRows():
                before, after = torch.tensor(call.moved).T
                for cache in self._caches.values():
                    rows = as_rows(cache)
                    rows.index_copy_(0, after, rows.index_select(0, before))
            case LoseRows():
                give_back([as_rows(cache) for cache in self._caches.values()], call.first)
            case FreeLayer():
                self._caches.pop(call.layer, None)
            case Hello():
                raise TransferFailed("there was a Hello before")

    def _rows(self, layer: int, blocks: int) -> torch.Tensor:
        """The guests' rows of a layer; its pages are untouched at first. Raises TransferFailed once they have ended."""
        if self.ended is not None:
            raise TransferFailed(self.ended)
        if layer not in self._caches:
            own = self._layers.cache(layer)
            shape = (blocks, *own.shape[1:])
            size = own.element_size() * own[0].numel() * blocks
            self._caches[layer] = untouched(size).view(own.dtype).view(shape)
        return as_rows(self._caches[layer])

    def _hop(self, call: HopCall, memory: memoryview) -> None:
        """Run layers for a step of the buddy."""
        dtype = self._config.model_config.dtype
        tensors = hop_tensors(memory, call, self._config.model_config.get_hidden_size(), dtype)
        with self._computing, set_current_vllm_config(self._config):
            # This worker's builder: what a backend puts into the metadata (pointers, on a CPU) does not travel.
            builder = self._runner.attn_groups[0][0].get_metadata_builder()
            metadata = builder.build(
                0,
                CommonAttentionMetadata(
                    query_start_loc=tensors.starts,
                    query_start_loc_cpu=tensors.starts,
                    seq_lens=tensors.lengths,
                    num_reqs=call.requests,
                    num_actual_tokens=call.actual,
                    max_query_len=call.longest_query,
                    max_seq_len=call.longest_context,
                    block_table_tensor=tensors.table,
                    slot_mapping=tensors.slots,
                ),
            )
            names = self._layers.names[call.first : call.last]
            context = create_forward_context(
                dict.fromkeys(names, metadata),
                self._config,
                slot_mapping=dict.fromkeys(names, tensors.slots),
                skip_compiled=True,
            )
            with self._with_caches(call), override_forward_context(context):
                hidden, residual = tensors.hidden, tensors.residual if call.has_residual else None
                # A layer may compute in place, and the memory is the buddy's.
                hidden = hidden.clone()
                residual = None if residual is None else residual.clone()
                for module in self._layers.modules[call.first : call.last]:
                    hidden, residual = module(tensors.positions, hidden, residual)
            tensors.hidden.copy_(hidden)
            tensors.residual.copy_(residual)
            self.hops += 1

    @contextlib.contextmanager
    def _with_caches(self, call: HopCall) -> Any:
        """Have the layers compute with the guests' KV."""
        own = {layer: self._layers.cache(layer) for layer in range(call.first, call.last)}
        try:
            for layer in own:
                self._layers.set_cache(layer, self._caches[layer])
            yield
        finally:
            for layer, cache in own.items():
                self._layers.set_cache(layer, cache)
