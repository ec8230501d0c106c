"""The live comparison of several models: its requests, its pools, and the settings of its servers."""

import asyncio

from app.settings import Settings
from benchmarks.servers import mell_config
from benchmarks.sharing.live import LEAST, RIG, PlayedModels, budget_settings, model_settings, play, shares

ANSWER = b'HTTP/1.1 200 OK\r\n\r\ndata: {"text":"a"}\n\ndata: {"text":"b"}\n\ndata: [DONE]\n\n'
REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}"


async def test_each_model_is_asked_at_its_port_and_what_is_refused_is_lost() -> None:
    seen = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        seen.append(head)
        writer.write(REFUSAL if b"X-Request-Id: b-" in head else ANSWER)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        rows = [(0.0, 5, 2, "a"), (0.01, 5, 2, "b"), (0.02, 5, 2, "a")]
        played = await play("x", rows, lambda model: port, str)
    assert len(seen) == 3 and (len(played.whole), played.lost) == (2, 1)
    assert "503" in played.reason and "x" in played.row() and "503" in played.row()
    assert PlayedModels("none", (), 3, "down").row().split() == ["none", "0", "3", "down"]


def test_pools_have_all_blocks_by_rate_and_nobody_less_than_a_request() -> None:
    assert shares(3 * LEAST + 60, [3.0, 2.0, 1.0]) == [LEAST + 30, LEAST + 20, LEAST + 10]
    assert min(shares(3 * LEAST, [9.0, 1.0, 1.0])) == LEAST


def test_the_servers_have_a_pool_for_each_model() -> None:
    models = [model_settings(name, 40 + number, least=0) for number, name in enumerate("abc")]
    config = mell_config(7, 1, RIG, models, budget_settings(2400, 5.0))
    settings = Settings.model_validate(config["applications"][0]["args"])
    assert settings.memory.budget_mib == 2400
    assert [each.engine_kwargs["num_gpu_blocks_override"] for each in settings.llm_configs] == [40, 41, 42]
    awake = [model_settings(name, 40) for name in "abc"]
    plain = Settings.model_validate(mell_config(7, 1, RIG, awake, {})["applications"][0]["args"])
    assert plain.memory.budget_mib is None and len(plain.llm_configs) == 3
