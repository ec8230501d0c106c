"""vLLM's worker that can be half of a pair. All calls of `mell_pair_*` come between two steps.

mell_pair_describe()             the model's layers, or why it cannot
mell_pair_listen(epoch)          serve the buddy's guests; their address
mell_pair_link(...)              connect to the buddy's
mell_pair_copy(layer, back, rows)   begin to copy a layer; the executor adds the rows of blocks with KV
mell_pair_give(layer), mell_pair_take_back(layer), mell_pair_forget(layer, back)   end the copy, see `half`
mell_pair_load()                 load the parameters of all remote layers
mell_pair_look()                 the state of the pair here
mell_pair_abandon()              end the connections to a buddy that is lost
mell_pair_be_whole()             after the buddy's loss: all layers are here, the pair is over
mell_pair_close()                the pair is over
"""

import logging
import threading
from typing import Any

import torch
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from migration.kv.pair.guests import Guests
from migration.kv.pair.half import Half
from migration.kv.pair.layers import DecoderLayers, Unpairable
from migration.kv.pair.link import BuddyLost
from migration.kv.pair.wire import hop_bytes
from migration.kv.parameters import Parameters
from migration.kv.worker import connector_of_worker

log = logging.getLogger(__name__)


class PairWorker(CPUWorker):
    """See the module. `MellWorker` is mixed into it."""

    mell_parameters: Parameters

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._computing = threading.Lock()
        self._guests: Guests | None = None
        self._half: Half | None = None

    # --- steps ------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any) -> Any:
        """See vLLM's. Guests compute between steps, and while this one waits for the buddy."""
        with self._computing:
            output = super().execute_model(scheduler_output)
        if self._half is not None and (state := self.model_runner.execute_model_state) is not None:
            self._half.note_step(next(iter(state.slot_mappings.values())))
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """See vLLM's. A lost step yields no token for anybody; nothing is drawn for it, and no grammar advances."""
        runner = self.model_runner
        if self._half is None or not self._half.loses_steps or runner.execute_model_state is None:
            return super().sample_tokens(grammar_output)
        self._half.stats.lost_steps += 1
        runner.execute_model_state = None
        connected, runner.kv_connector_output = runner.kv_connector_output, None
        ids = list(runner.input_batch.req_ids)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={id: i for i, id in enumerate(ids)},
            sampled_token_ids=[[] for _ in ids],
            kv_connector_output=connected,
        )

    # --- the pair ---------------------------------------------------------------------------------------

    def mell_pair_describe(self) -> dict[str, Any]:
        """The number of "layers", the bytes of the "parameters" of the smallest, and why this engine is "unable" to be
        half of a pair; None if it can.
        """
        try:
            layers = self._layers()
        except Unpairable as error:
            return {"layers": 0, "parameters": 0, "unable": str(error)}
        sizes = [self.mell_parameters.size_of(module.modules()) for module in layers.modules]
        return {"layers": len(layers), "parameters": min(sizes), "unable": None}

    def mell_pair_listen(self, epoch: int) -> str:
        """Serve the buddy of a new pair; the address."""
        self.mell_pair_close()
        layers = self._layers()
        self._guests = Guests(epoch, self.model_runner, self.vllm_config, layers, self._computing)
        self._half = Half(
            layers,
            self._computing,
            self.vllm_config.model_config.get_hidden_size(),
            self.vllm_config.cache_config.block_size,
            self.mell_parameters,
        )
        return self._guests.address

    def mell_pair_link(self, address: str, epoch: int, hop_s: float) -> str | None:
        """Connect to the buddy, which answers each call within `hop_s` seconds; the reason if that failed."""
        assert self._half is not None, "it listens"
        scheduler, cache = self.vllm_config.scheduler_config, self.vllm_config.cache_config
        model, connector = self.vllm_config.model_config, connector_of_worker()
        columns = -(-model.max_model_len // cache.block_size)
        size = hop_bytes(
            scheduler.max_num_batched_tokens, scheduler.max_num_seqs, columns, model.get_hidden_size(), model.dtype
        )
        try:
            self._half.connect(address, epoch, connector.num_blocks, size, hop_s)
        except BuddyLost as error:
            return str(error)
        with connector.changing_layers() as layout:
            layout.elsewhere = self._half
        return None

    def mell_pair_copy(self, layer: int, back: bool, rows: list[int]) -> None:
        """See `Half.copy`."""
        assert self._half is not None
        with connector_of_worker().changing_layers():
            self._half.copy(layer, rows, back)

    def mell_pair_forget(self, layer: int, back: bool) -> None:
        """See `Half.forget_copy`."""
        assert self._half is not None
        with connector_of_worker().changing_layers():
            self._half.forget_copy(layer, back)

    @torch.inference_mode()
    def mell_pair_give(self, layer: int) -> str | None:
        """See `Half.give`; the reason if it failed."""
        assert self._half is not None
        try:
            with connector_of_worker().changing_layers():
                self._half.give(layer)
        except BuddyLost as error:
            return str(error)
        return None

    @torch.inference_mode()
    def mell_pair_take_back(self, layer: int) -> str | None:
        """See `Half.take_back`; the reason if it failed."""
        assert self._half is not None
        try:
            with connector_of_worker().changing_layers():
                self._half.take_back(layer)
        except BuddyLost as error:
            return str(error)
        return None

    def mell_pair_load(self) -> str | None:
        """Load the parameters of all remote layers; the reason if they cannot be had."""
        assert self._half is not None
        try:
            self._half.load()
        except Exception as error:
            log.exception("the parameters of remote layers could not be loaded")
            return f"{type(error).__name__}: {error}"
        return None

    def mell_pair_look(self) -> dict[str, Any]:
        """The state of the pair here, see `PairLook`."""
        half, guests = self._half, self._guests
        if half is None or guests is None:
            return {}
        half.look()
        return {
            "remote": len(half.remote),
            "is_copying": half.is_copying,
            "copy_failure": half.copy_failure,
            "lost": half.lost,
            "guest_layers": guests.layers,
            "hops": half.stats.hops,
            "hop_tokens": half.stats.tokens,
            "hop_seconds": half.stats.seconds,
            "buddy_seconds": half.stats.buddy_seconds,
            "lost_steps": half.stats.lost_steps,
            "served": guests.hops,
        }

    def mell_pair_abandon(self) -> None:
        """See `Half.abandon`. Free the buddy's KV."""
        assert self._half is not None
        assert self._guests is not None
        self._half.abandon()
        self._guests.close()

    def mell_pair_be_whole(self) -> None:
        """See `Half.be_whole`; the pair is over."""
        assert self._half is not None
        connector = connector_of_worker()
        with connector.changing_layers():
            # The next step renews the tables of the requests that have lost their KV. Until then, no copy reads it.
            connector.tables.lose(range(connector.num_blocks))
            self._half.be_whole()
        self.mell_pair_close()

    def mell_pair_close(self) -> None:
        """End the pair: all own layers are here, and the buddy needs none of them."""
        if self._half is not None:
            assert not self._half.remote, "all layers are here"
            with connector_of_worker().changing_layers() as layout:
                layout.elsewhere = None
                self._half.close()
        if self._guests is not None:
            self._guests.close()
        self._half = self._guests = None

    def _layers(self) -> DecoderLayers:
        """The model's layers. Raises Unpairable."""
        config, connector = self.vllm_config, connector_of_worker()
        reasons = {
            "it has several workers": config.parallel_config.world_size > 1,
            "it has adapters (enable_lora)": config.lora_config is not None,
            "it decodes speculatively": config.speculative_config is not None,
            "its positions have several axes (M-RoPE)": config.model_config.uses_mrope,
            "its model is compiled (engine_kwargs.enforce_eager: false)": not config.model_config.enforce_eager,
        }
        found = [reason for reason, holds in reasons.items() if holds]
        found += filter(None, (connector.unsupported, self.mell_parameters.why_kept()))
        if found:
            raise Unpairable(found[0])
        (group,) = self.model_runner.kv_cache_config.kv_cache_groups
        attention = self.vllm_config.compilation_config.static_forward_context
        return DecoderLayers(self.model_runner.model, attention, group.layer_names)
