"""The names of prompts' blocks, as the replicas' engines name them: the scheduler finds prompts in caches by them."""

import logging
import os

from deployments.engine.naming import BlockNamer
from migration.protocol.core_messages import Adapter, CoreRequest, Frames
from policies.prefix.names import Naming

log = logging.getLogger("ray.serve")


class PromptNamer:
    """Names blocks with the hash algorithm `algorithm` of vLLM's configuration."""

    def __init__(self, algorithm: str) -> None:
        self._algorithm = algorithm
        self._namer: BlockNamer | None = None
        self._other: Naming | None = None
        """The newest naming of engines that differs from that of this process."""

    def names(self, request: CoreRequest, frames: Frames, naming: Naming | str) -> tuple[int, ...]:
        """The names of the full blocks of a request, which is encoded in `frames`, by the engines' `naming`.

        There are none if that is not known, if this process names blocks differently, or for an adapter whose folder on
        the engines' machines is not known here; see `why_unnamed`.
        """
        if isinstance(naming, str) or not self._agrees(naming):
            return ()
        adapter = request.lora_request
        if adapter is not None:
            folder = _folder(adapter.lora_path)
            if folder is None:
                return ()
            # An engine knows an adapter by its number, and by the folder that it has loaded (`LoadedAdapters`).
            adapter = Adapter(str(adapter.lora_int_id), adapter.lora_int_id, folder)
        assert self._namer is not None
        return tuple(self._namer.names(request, lambda: frames, adapter))

    def why_unnamed(self, request: CoreRequest, naming: Naming | str) -> str:
        """The one reason why `names` gives none for a request."""
        tokens, adapter = len(request.prompt_token_ids or ()), request.lora_request
        if isinstance(naming, str):
            return f"the blocks of the prompt have no names: {naming}"
        if not self._agrees(naming):
            return "this ingress names blocks differently from the engines: see its log"
        if adapter is not None and _folder(adapter.lora_path) is None:
            return f"this ingress does not know the folder of the adapter {adapter.lora_name!r}, part of the names"
        return f"the prompt has {tokens} tokens, and a KV block {naming.block_size}: only full blocks are cached"

    def _agrees(self, naming: Naming) -> bool:
        """True if this process names blocks as the engines do."""
        if self._namer is None or self._namer.naming.block_size != naming.block_size:
            self._namer = BlockNamer(naming.block_size, self._algorithm)
        if self._namer.naming == naming:
            return True
        if self._other != naming:
            self._other = naming
            log.warning(
                "prompts have no names, and are not routed by content: the engines name KV blocks by %s, this process "
                "by %s; a PYTHONHASHSEED must be equal on all machines, and xxhash needs one",
                naming,
                self._namer.naming,
            )
        return False


def _folder(path: str) -> str | None:
    """The absolute path of an adapter's folder, as vLLM makes it of a local one; None for a name on a hub."""
    if os.path.isabs(path):
        return path
    if path.startswith("~"):
        return os.path.expanduser(path)
    return os.path.abspath(path) if os.path.exists(path) else None
