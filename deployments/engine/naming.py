"""The names of a context's KV blocks, by vLLM's own functions: adapter, salt and media included."""

from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder

from migration.protocol.core_messages import Frames
from policies.prefix.names import name_of


class BlockNamer:
    """Names blocks as the engine of `config` does.

    An algorithm with a random seed gives other names than the engine's, which its cache never has.
    """

    def __init__(self, config: Any) -> None:
        cache = config.cache_config
        hashing = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
        init_none_hash(hashing)
        self._hasher = get_request_block_hasher(cache.block_size, hashing)
        self._decoder = MsgpackDecoder(EngineCoreRequest)

    def names(self, request: Frames) -> list[int]:
        """The names of the full blocks of an encoded request's prompt."""
        decoded = Request.from_engine_core_request(self._decoder.decode(request), self._hasher)
        return [name_of(digest) for digest in decoded.block_hashes]
