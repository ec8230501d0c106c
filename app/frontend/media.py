"""vLLM's loader of images, audio and video, whose every failure with an item is the client's error."""

from typing import Any

import aiohttp
from PIL import Image
from vllm.exceptions import VLLMError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector
from vllm.multimodal.media.base import MediaIO

NAME = "mell"
"""The loader's name in `VLLM_MEDIA_CONNECTOR`."""

_ANSWERED = (VLLMError, ValueError, aiohttp.ClientError, TimeoutError)
"""Errors that vLLM's application answers with a status of their own, and those of a server that is fetched from."""


@MEDIA_CONNECTOR_REGISTRY.register(NAME)
class GuardedMediaConnector(MediaConnector):
    """Decoders raise anything for content that is broken on purpose, which vLLM's application would answer with 500."""

    async def load_from_url_async(self, url: str, media_io: MediaIO[Any], *, fetch_timeout: int | None = None) -> Any:
        """Fetch and decode an item. Raises ValueError for one that cannot be decoded."""
        try:
            return await super().load_from_url_async(url, media_io, fetch_timeout=fetch_timeout)
        except _ANSWERED:
            raise
        except Exception as error:
            raise ValueError(f"an item of media cannot be decoded: {str(error)[:200]}") from error


def bound_images(pixels: int) -> None:
    """Have images of more than twice as many pixels refused by the decoder, also those within other files.

    vLLM checks the size of the outer image only, and that before it is decoded (`VLLM_MAX_IMAGE_PIXELS`).
    """
    Image.MAX_IMAGE_PIXELS = pixels
