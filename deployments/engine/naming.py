"""The names of a context's KV blocks, by vLLM's own functions: adapter, salt and media included."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from deployments.engine.vllm_messages import EngineCoreRequest, MsgpackDecoder
from migration.protocol.core_messages import NIL, Adapter, CoreRequest, Frames
from policies.prefix.names import Naming, name_of


class BlockNamer:
    """Names blocks as an engine with this block size and hash algorithm does.

    An algorithm with a random seed gives other names than the engine's, which its cache never has.
    """

    def __init__(self, block_size: int, algorithm: str) -> None:
        hashing = get_hash_fn_by_name(algorithm)
        init_none_hash(hashing)
        self._hasher = get_request_block_hasher(block_size, hashing)
        self._decoder = MsgpackDecoder(EngineCoreRequest)
        (mark,) = self._of_tokens(list(range(block_size)))
        self.naming = Naming(block_size, algorithm, mark)
        """Its kind of names."""

    def names(self, request: CoreRequest, encode: Callable[[], Frames], adapter: Adapter | None = None) -> list[int]:
        """The names of the full blocks of a request's prompt.

        `encode` returns the request, encoded; it is called for prompts of more than tokens. `adapter` is the request's
        as the engine has loaded it.
        """
        if not request.has_media and bytes(request.prompt_embeds) == bytes(NIL):
            return self._of_tokens(request.prompt_token_ids or [], request.cache_salt, adapter)
        decoded = Request.from_engine_core_request(self._decoder.decode(encode()), None)
        decoded.lora_request = cast(Any, adapter)
        return [name_of(digest) for digest in self._hasher(decoded)]

    def _of_tokens(self, tokens: list[int], salt: str | None = None, adapter: Adapter | None = None) -> list[int]:
        """The names of a context of tokens alone. The hasher reads no other member of vLLM's `Request`."""
        request = SimpleNamespace(
            all_token_ids=tokens,
            num_tokens=len(tokens),
            block_hashes=[],
            mm_features=[],
            prompt_embeds=None,
            cache_salt=salt,
            lora_request=adapter,
        )
        return [name_of(digest) for digest in self._hasher(cast(Any, request))]
