"""Requests with images through vLLM's application over fake replicas: what reaches an engine, and hostile ones."""

import asyncio
import base64
import contextlib
import io
import random
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from PIL import Image
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder

from app.frontend.media import GuardedMediaConnector, bound_images
from migration.protocol.continuing import continued
from tests.app.frontend.conftest import FrontendApi, config, serving
from tests.app.frontend.test_app import move, running
from tests.app.frontend.test_exposed import Cost, Exposed
from tests.counts import LONG
from tests.tinyvision import MOST_TOKENS, data_url, encoded, ensure_tiny_vision

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    # vLLM's code, and what it imports for media, warns of some inputs.
    pytest.mark.filterwarnings("default"),
]

CHATS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
MODEL = {"model_source": str(ensure_tiny_vision())}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[FrontendApi]:
    async with serving(config(MODEL)) as served:
        yield served


def chat(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "look"}]}], **more}


def image(url: str | None, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def spec_of(api: FrontendApi) -> Any:
    (run,) = api.service.streams._live.values()
    return run.spec


def at_engine(api: FrontendApi, outputs: tuple[int, ...] = ()) -> EngineCoreRequest:
    """The running request as an engine core of vLLM reads it, after `outputs`."""
    frames = continued(spec_of(api), "name", "key", outputs)
    request: EngineCoreRequest = MsgpackDecoder(EngineCoreRequest).decode([bytearray(frame) for frame in frames])
    return request


ASKED = {
    "chat": (CHATS, chat(image(data_url(1)), max_tokens=200)),
    "response": (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": [{"type": "input_image", "image_url": data_url(1), "detail": "auto"}]}
            ],
            "max_output_tokens": 200,
        },
    ),
    "message": (
        MESSAGES,
        {
            "model": "mell-tiny",
            "max_tokens": 200,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": {
                                "type": "base64",
                                "media_type": "image/png",
                                "data": data_url(1).partition(",")[2],
                            },
                        }
                    ],
                }
            ],
        },
    ),
}


@pytest.mark.parametrize(("path", "body"), ASKED.values(), ids=ASKED)
async def test_an_image_goes_along_with_its_request_wherever_it_moves(
    api: FrontendApi, path: str, body: dict[str, Any]
) -> None:
    """Each time in full: a replica may not have had the image before."""
    for _ in range(2):
        asking = asyncio.create_task(api.post(path, **body))
        (id,) = await running(api.service)
        await move(api.service, id, "b")
        request = at_engine(api, (5, 6))
        (feature,) = request.mm_features or []
        place, tokens = feature.mm_position, request.prompt_token_ids or []
        assert set(tokens[place.offset : place.offset + place.length]) == {512}
        assert tokens[-2:] == [5, 6] and feature.data is not None
        assert feature.data["pixel_values"].data.shape[0] == 4 * place.length
        assert (await asking).status_code == 200
        await api.service.idle()


async def test_choices_share_the_bytes_of_an_image(api: FrontendApi) -> None:
    asking = asyncio.create_task(api.post(CHATS, **chat(image(data_url(2)), n=3, max_tokens=200)))
    await running(api.service, 3)
    bodies = [run.spec.body for run in api.service.streams._live.values()]
    assert len({id(tensor) for body in bodies for tensor in body[1:]}) == len(bodies[0][1:]) >= 1
    assert api.frontend._client.core._room._used == sum(len(tensor) for body in bodies for tensor in body[1:])
    await asking
    await api.service.idle()
    assert api.frontend._client.core._room._used == 0


async def test_a_prompt_is_as_long_as_its_images(api: FrontendApi) -> None:
    answer = await api.post("/tokenize", **chat(image(data_url(3, 2000, 2000))))
    assert answer.json()["tokens"].count(512) == MOST_TOKENS
    answer = await api.post(CHATS, **chat(*[image(data_url(i)) for i in range(16)], max_tokens=2))
    assert answer.status_code == 400 and "maximum" in answer.json()["error"]["message"]


# --- hostile --------------------------------------------------------------------------------------------


def bomb(side: int) -> str:
    """An image of one colour, as a PNG of a thousandth of its pixels' size."""
    rows = zlib.compressobj(9)
    data = b"".join(rows.compress(bytes(side // 8 + 1)) for _ in range(side)) + rows.flush()

    def chunk(kind: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4) + kind + content + zlib.crc32(kind + content).to_bytes(4)

    head = side.to_bytes(4) * 2 + bytes((1, 0, 0, 0, 0))
    return encoded(
        "image/png", b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


HOSTILE: dict[str, tuple[str, dict[str, Any]]] = {
    "a bomb": (CHATS, chat(image(bomb(20_000)))),
    "a broken image": (CHATS, chat(image(data_url(1)[:400]))),
    "no image": (CHATS, chat(image(encoded("image/png", b"no image")))),
    "an empty image": (CHATS, chat(image("data:image/png;base64,"))),
    "no base64": (CHATS, chat(image("data:image/png;base64,%%%%"))),
    "no data": (CHATS, chat(image("data:"))),
    "plain data": (CHATS, chat(image("data:image/png,abc"))),
    "no address": (CHATS, chat(image(None))),
    "no address in a text": (CHATS, chat(image(""))),
    "a name instead of an image": (CHATS, chat(image(None, uuid="yours"))),
    "a name and an empty image": (CHATS, chat({"type": "image_url", "image_url": None, "uuid": "yours"})),
    "an image of a line": (CHATS, chat(image(data_url(1, 3000, 1)))),
    "1,000 images": (CHATS, chat(*[image(data_url(1, 30, 30))] * 1000)),
    "an image as an object": (CHATS, chat({"type": "image_pil", "image_pil": {"a": 1}})),
    "embeddings": (CHATS, chat({"type": "image_embeds", "image_embeds": "AAAA"})),
    "audio": (CHATS, chat({"type": "input_audio", "input_audio": {"data": "AAAA" * 250_000, "format": "wav"}})),
    "video": (CHATS, chat({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}})),
    "arguments of the processor": (
        CHATS,
        chat(image(data_url(1)), mm_processor_kwargs={"size": {"longest_edge": 1 << 40}}),
    ),
    "arguments of the decoder": (CHATS, chat(image(data_url(1)), media_io_kwargs={"image": {"image_mode": "F"}})),
    "a forged address": (CHATS, chat(image("http://169.254.169.254/latest"))),
    "a broken image in a response": (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,", "detail": "auto"}]}]},
    ),
    "a broken image in a message": (
        MESSAGES,
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
                    ],
                }
            ]
        },
    ),
}


@pytest.mark.parametrize(("path", "body"), HOSTILE.values(), ids=HOSTILE)
async def test_hostile_media_are_refused(api: FrontendApi, path: str, body: dict[str, Any]) -> None:
    exposed = Exposed(api)
    with Cost():
        response = await exposed.post(path, **body)
    assert response.status_code == 400 and len(response.content) < 20_000, response.text[:500]
    assert exposed.untouched


async def test_names_of_items_do_not_reach_vllm(api: FrontendApi) -> None:
    """Two clients that use one name for two images get answers to their own images."""
    exposed, pixels = Exposed(api), []
    for seed in (5, 6):
        asking = asyncio.create_task(exposed.post(CHATS, **chat(image(data_url(seed), uuid="mine"), max_tokens=200)))
        await running(api.service)
        (feature,) = at_engine(api).mm_features or []
        pixels.append((feature.identifier, feature.data["pixel_values"].data if feature.data else None))
        assert (await asking).status_code == 200
        await api.service.idle()
    (one, here), (other, there) = pixels
    assert "mine" not in (one, other) and one != other
    assert here is not None and there is not None and not bool((here == there).all())


async def test_images_are_decoded_a_few_at_a_time(api: FrontendApi) -> None:
    exposed = Exposed(api, max_media=2)
    assert (await exposed.post(CHATS, **chat(*[image(data_url(1))] * 3))).status_code == 400
    asked = [exposed.post(CHATS, **chat(image(data_url(i)), image(data_url(i + 1)), max_tokens=2)) for i in range(4)]
    assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * 4


async def test_media_of_running_requests_are_bounded(api: FrontendApi) -> None:
    room = api.frontend._client.core._room
    before, room._limit = room._limit, 400_000  # room for one image
    try:
        asking = asyncio.create_task(api.post(CHATS, **chat(image(data_url(7)), max_tokens=200)))
        await running(api.service)
        answer = await api.post(CHATS, **chat(image(data_url(8)), max_tokens=200))
        assert answer.status_code == 503
        assert (await asking).status_code == 200
        room._limit = 1000
        answer = await api.post(CHATS, **chat(image(data_url(9)), max_tokens=200))
        assert answer.status_code == 400 and "MiB of tensors" in answer.json()["error"]["message"]
    finally:
        room._limit = before


def pictures() -> dict[str, bytes]:
    """A small picture in the formats that vLLM decodes and Pillow writes."""
    picture = Image.effect_noise((40, 30), 80).convert("RGB")
    found = {}
    for kind in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "ICO", "TGA", "PPM", "PCX", "SGI", "DDS", "JPEG2000"):
        file = io.BytesIO()
        picture.save(file, kind)
        found[kind] = file.getvalue()
    return found


PICTURES = pictures()


@pytest.mark.parametrize("kind", PICTURES)
async def test_broken_pictures_are_the_clients_error(kind: str) -> None:
    """Bytes changed at random, and cut off: decoders raise whatever they like."""
    connector, draw = GuardedMediaConnector(), random.Random(kind)
    bound_images(1 << 25)
    await connector.fetch_image_async(encoded("image/x", PICTURES[kind]))
    for _ in range(400 if LONG else 60):
        broken = bytearray(PICTURES[kind])
        for _ in range(draw.choice([1, 3, 30])):
            broken[draw.randrange(len(broken) if draw.random() < 0.5 else 60)] = draw.choice(
                [0, 255, draw.getrandbits(8)]
            )
        with contextlib.suppress(ValueError):
            await connector.fetch_image_async(encoded("image/x", bytes(broken[: draw.choice([-1, 20, None])])))


# --- addresses ------------------------------------------------------------------------------------------


class Site:
    """A web server: `/x.png` is an image, `/away` leads there, `/large` never ends. `asked` are the paths asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.asked.append(head.split()[1])
        with contextlib.suppress(ConnectionError):
            match self.asked[-1]:
                case "/x.png":
                    content = base64.b64decode(data_url(1).partition(",")[2])
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content) + content)
                case "/away":
                    writer.write(b"HTTP/1.1 302 Found\r\nLocation: /x.png\r\nContent-Length: 0\r\n\r\n")
                case "/large":
                    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
                    while True:
                        writer.write(bytes(1 << 20))
                        await writer.drain()
                case _:
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
        writer.close()


async def test_addresses_of_allowed_domains_are_fetched_and_redirects_are_not_followed() -> None:
    site = Site()
    server = await asyncio.start_server(site.answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    allowing = config(MODEL).model_copy(update={"allowed_media_domains": ["localhost"]})
    async with server, serving(allowing) as api:
        exposed = Exposed(api, allowed_media_domains=["localhost"])

        async def status(host: str, path: str) -> int:
            url = f"http://{host}:{port}{path}"
            return (await exposed.post(CHATS, **chat(image(url), max_completion_tokens=2))).status_code

        assert await status("localhost", "/x.png") == 200
        assert site.asked == ["/x.png"]
        assert await status("127.0.0.1", "/x.png") == 400
        assert await status("localhost", "/away") in range(400, 500)
        assert site.asked == ["/x.png", "/away"], "nothing else was asked for"
        assert await status("localhost", "/none") in range(400, 500)
        assert await status("localhost", "/large") in range(400, 500)
