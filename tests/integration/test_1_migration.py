"""Moved requests give what unmoved ones give, over HTTP, on real engines."""

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.counts import LONG, LONG_ONLY
from tests.integration import faults
from tests.integration.application import BLOCK, Answer, Application, Client, eventually, prompt
from tests.integration.faults import Fault

MOVES, WORDS = (60, 500) if LONG else (8, 150)


async def reference(client: Client, tokens: list[int], count: int) -> str:
    """The output of an unmoved run. It comes first: whatever it leaves in caches was not moved."""
    text, _ = await client.complete(tokens, count)
    return text


async def moved(
    client: Client, label: str, tokens: list[int], count: int, at: list[int], paths: list[str], **sampling: Any
) -> tuple[Answer, list[dict[str, Any]]]:
    """Run a request that is moved when it has had `at[i]` tokens; its answer and its migrations."""
    answer, records = Answer(), []
    reading = asyncio.create_task(client.stream(answer, tokens, count, label, **sampling))
    for position, path in zip(at, paths, strict=True):
        await answer.until(position)
        response = await client.move(label, path=path)
        if response.status_code == 202:
            records.append(await client.outcome(response.json()["id"]))
        else:
            assert answer.done or response.status_code == 404, response.text
    await reading
    return answer, records


async def loaded(client: Client, target: str, before: dict[str, int], blocks: int) -> None:
    """Wait for the target to report that it has loaded exactly `blocks` more blocks: a busy replica reports late."""
    more: list[int] = []

    async def reported() -> bool:
        more[:] = [r["kv_blocks_loaded"] - before[r["id"]] for r in await client.running() if r["id"] == target]
        return more == [blocks]

    try:
        await eventually(reported)
    except TimeoutError:
        pytest.fail(f"{more} blocks were loaded where {blocks} were moved")


def journeys(draw: random.Random) -> list[tuple[int, int, list[int], list[str]]]:
    """(prompt, output, move at, paths): block boundaries, first and last tokens, several moves."""
    chosen = [
        (BLOCK * 4, 60, [0], ["kv"]),
        (BLOCK * 4 - 1, 60, [1], ["kv"]),
        (BLOCK * 4 + 1, 60, [BLOCK - 1], ["kv"]),
        (BLOCK * 3, 97, [BLOCK], ["tokens"]),
        (BLOCK, 64, [BLOCK + 1], ["kv"]),
        (5, 40, [1], ["tokens"]),
        (300, 50, [47], ["kv"]),
        (300, 50, [49], ["tokens"]),
        (900, 200, [10, 40, 80], ["kv", "kv", "kv"]),
        (700, 200, [10, 40, 80], ["tokens", "kv", "tokens"]),
    ]
    while sum(len(c[2]) for c in chosen) < MOVES * 1.2:
        output = draw.randrange(120, 220)
        at = sorted(draw.sample(range(output - 40), draw.choice([1, 2, 3])))
        chosen.append((draw.randrange(20, 1200), output, at, [draw.choice(["kv", "tokens"]) for _ in at]))
    return chosen


async def test_many_moves_change_nothing(application: Application) -> None:
    seed = 20240607
    draw = random.Random(seed)
    committed: Counter[str] = Counter()
    diversity: set[str] = set()
    cold: list[int] = []
    gate = asyncio.Semaphore(3)

    async def one(number: int, journey: tuple[int, int, list[int], list[str]]) -> None:
        length, output, at, paths = journey
        tokens = prompt(length, f"{seed}/{number}")
        async with gate:
            want = await reference(client, tokens, output)
            answer, records = await moved(client, f"j{number}", tokens, output, at, paths)
        assert answer.text == want, (journey, records)
        assert answer.finish == "length"
        assert answer.usage is not None
        usage = {"prompt_tokens": length, "completion_tokens": output, "total_tokens": length + output}
        assert answer.usage.items() >= usage.items()
        diversity.update(want.split())
        committed.update(str(r["path"]) for r in records if r["outcome"] == "committed")
        # Later moves may lead to replicas that still have the request's blocks; the first one's target has none.
        cold.extend(r["blocks"] for r in records[:1] if r["path"] == "kv")

    async with application.client() as client:
        before = sum(r["kv_blocks_loaded"] for r in await client.running())
        await asyncio.gather(*(one(i, j) for i, j in enumerate(journeys(draw))))
        await client.idle()
        read = sum(r["kv_blocks_loaded"] for r in await client.running()) - before
    assert sum(committed.values()) >= MOVES, committed
    assert min(committed["kv"], committed["tokens"]) >= MOVES / 4, committed
    # Where the target is the replica of the unmoved run, it has the blocks already: by chance about every other time.
    assert read >= 0.1 * sum(cold) > 0, "the moved blocks were hardly read"
    assert len(diversity) > WORDS, "the model repeats itself: equality would prove nothing"


@pytest.mark.parametrize("over", [pytest.param("collective", marks=LONG_ONLY), "shared"])
async def test_corrupted_blocks_change_the_output(application: Application, over: str) -> None:
    tokens = prompt(800, f"corrupt/{over}")
    async with application.client() as client:
        await client.settle()  # so that both runs begin on the same replica, and the other one has no blocks
        want = await reference(client, tokens, 300)
        faults.write(application.faults, over, Fault.CORRUPT)
        before = {r["id"]: r["kv_blocks_loaded"] for r in await client.running()}
        answer, (record,) = await moved(client, f"corrupt-{over}", tokens, 300, [10], ["kv"])
        assert (record["outcome"], record["path"]) == ("committed", "kv")
        assert record["blocks"] >= 800 // BLOCK
        await loaded(client, record["target"], before, record["blocks"])
    assert answer.text != want


async def test_wrong_blocks_between_workers_change_the_output(application: Application) -> None:
    """Where the workers exchange blocks by themselves: those of another request."""
    tokens, others = prompt(800, "direct"), prompt(900, "direct/other")
    async with application.client() as client:
        await client.settle()
        want = await reference(client, tokens, 300)
        other = Answer()
        reading = asyncio.create_task(client.stream(other, others, 600, "direct-other"))
        await other.until(5)
        running = [r for replica in await client.running() for r in replica["requests"]]
        (key,) = (f"{r['id']}.{r['hop']}" for r in running if r["label"] == "direct-other")
        faults.write(application.faults, "shared", instead=key)
        answer, (record,) = await moved(client, "direct", tokens, 300, [10], ["kv"])
        faults.write(application.faults, "shared")
        assert (record["outcome"], record["path"]) == ("committed", "kv")
        await reading
    assert answer.text != want


@LONG_ONLY
@pytest.mark.parametrize("over", ["collective", "shared"])
async def test_corrupted_tail_changes_the_output(application: Application, over: str) -> None:
    """All that is sent is one block that is not full; if a request has filled it, another one is moved."""
    async with application.client() as client:
        for attempt in range(8):
            tokens = prompt(4, f"corrupt tail/{over}/{attempt}")
            want = await reference(client, tokens, 200)
            faults.write(application.faults, over, Fault.CORRUPT)
            answer, (record,) = await moved(client, f"corrupt-tail-{over}-{attempt}", tokens, 200, [1], ["kv"])
            faults.write(application.faults, over)
            assert (record["outcome"], record["path"]) == ("committed", "kv")
            if record["blocks"] == 1:
                break
        else:
            pytest.fail("every request had filled a block before it moved")
    assert answer.text != want


@LONG_ONLY
@pytest.mark.parametrize("over", ["collective", "shared"])
@pytest.mark.parametrize("fault", [Fault.SILENT, Fault.FAIL])
async def test_move_with_a_failing_transfer_falls_back_to_tokens(
    application: Application, fault: Fault, over: str
) -> None:
    tokens = prompt(500, f"{fault}/{over}")
    async with application.client() as client:
        want = await reference(client, tokens, 600)
        faults.write(application.faults, over, fault)
        answer, (record,) = await moved(client, f"{fault}-{over}", tokens, 600, [5], ["kv"])
        assert answer.text == want
        assert (record["outcome"], record["path"]) == ("committed", "tokens")
        assert "kv failed" in record["reason"]
        faults.write(application.faults, over)
        _, (after,) = await moved(client, f"after-{fault}-{over}", prompt(500, f"after/{fault}"), 300, [5], ["kv"])
        assert (after["outcome"], after["path"]) == ("committed", "kv")
        await client.idle()


@LONG_ONLY
async def test_full_target_refuses(application: Application) -> None:
    async with application.client() as client:
        first, big = Answer(), []
        mover = asyncio.create_task(client.stream(first, prompt(3000, "mover"), 900, "mover"))
        await first.until(2)
        (home,) = [r["id"] for r in await client.running() if r["requests"]]
        (other,) = [r["id"] for r in await client.running() if not r["requests"]]
        for i in range(5):
            answer = Answer()
            big.append(asyncio.create_task(client.stream(answer, prompt(3000, f"big{i}"), 900, f"big{i}")))
            await answer.until(2)
            placed = [r["id"] for r in await client.running() for q in r["requests"] if q["label"] == f"big{i}"]
            if placed == [home]:
                response = await client.move(f"big{i}", target=other, path="tokens")
                await client.outcome(response.json()["id"])
        response = await client.move("mover", target=other)
        record = await client.outcome(response.json()["id"])
        assert record["outcome"] == "refused", record
        assert "no room" in str(record["error"])
        for task in (mover, *big):
            task.cancel()
        await asyncio.gather(mover, *big, return_exceptions=True)
        await client.idle()


STATEFUL: dict[str, dict[str, Any]] = {
    "seeded": {"temperature": 1.0, "seed": 7},
    "constrained": {"temperature": 1.0, "seed": 5, "structured_outputs": {"regex": "([a-z]{3} ){540}"}},
    "penalised": {"presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
    "all of it": {
        "temperature": 1.2,
        "seed": -3,
        "top_p": 0.95,
        "top_k": 50,
        "min_p": 0.001,
        "logit_bias": {"9": 2.0},
        "presence_penalty": -0.5,
        "frequency_penalty": 0.7,
        "repetition_penalty": 0.9,
        "min_tokens": 60,
    },
}


async def unmoved(client: Client, name: str, count: int) -> list[str]:
    """The text of a request of each kind; all run at once."""
    answers = await asyncio.gather(
        *(client.complete(prompt(400, f"{name}/{kind}"), count, **sampling) for kind, sampling in STATEFUL.items())
    )
    return [text for text, _ in answers]


async def moved_thrice(
    client: Client, name: str, count: int, at: list[int]
) -> list[tuple[Answer, list[dict[str, Any]]]]:
    """The same requests once more, each ordered to move when it has had `at[i]` tokens."""
    return await asyncio.gather(
        *(
            moved(client, f"{name}-{i}", prompt(400, f"{name}/{kind}"), count, at, ["kv", "tokens", "kv"], **sampling)
            for i, (kind, sampling) in enumerate(STATEFUL.items())
        )
    )


@LONG_ONLY
async def test_sampling_that_depends_on_earlier_output_is_the_same_after_a_move(application: Application) -> None:
    async with application.client() as client:
        want = await unmoved(client, "stateful", 540)
        answers = await moved_thrice(client, "stateful", 540, [1, 100, 200])
        await client.idle()
    for kind, text, (answer, records) in zip(STATEFUL, want, answers, strict=True):
        assert [r["outcome"] for r in records] == ["committed"] * 3, (kind, records)
        assert answer.text == text, (kind, records)


@LONG_ONLY
async def test_request_that_the_target_does_not_adopt_continues_at_its_source(application: Application) -> None:
    """The source has taken it out of its engine by then."""
    async with application.client() as client:
        want = await unmoved(client, "refused", 540)
        faults.write(application.faults, "shared", refuse=True)
        answers = await moved_thrice(client, "refused", 540, [20, 80, 100])
        await client.idle()
    for kind, text, (answer, records) in zip(STATEFUL, want, answers, strict=True):
        assert [(r["outcome"], r["cause"]) for r in records] == [("aborted", "no_room")] * 3, (kind, records)
        assert answer.text == text, (kind, records)


@LONG_ONLY
async def test_a_seeded_prompt_in_many_pieces_does_not_end_its_engine(application: Application) -> None:
    """It is sampled after each piece, and what was sampled is taken back."""
    tokens = prompt(3500, "pieces")
    async with application.client() as client:
        drawn = [(await client.complete(tokens, 20, temperature=1, seed=s))[0] for s in (1, 1, 2)]
        await client.idle()
    assert drawn[0] == drawn[1] != drawn[2]


@LONG_ONLY
@pytest.mark.parametrize("when", ["decoding", "moving"])
async def test_client_that_leaves_frees_its_blocks(application: Application, when: str) -> None:
    async with application.client() as client:
        answer = Answer()
        reading = asyncio.create_task(client.stream(answer, prompt(600, f"leave/{when}"), 3000, f"leaver-{when}"))
        await answer.until(5)
        if when == "moving":
            faults.write(application.faults, "collective", Fault.SILENT)
            assert (await client.move(f"leaver-{when}", path="kv")).status_code == 202
            await asyncio.sleep(0.3)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await client.idle()


@LONG_ONLY
async def test_a_migration_is_one_structured_line_in_its_replicas_log(application: Application) -> None:
    async with application.client() as client:
        _, (record,) = await moved(client, "logged", prompt(100, "logged"), 300, [5], ["tokens"])
    (line,) = _log_lines(record["source"], record["id"])
    assert line["migration"]["id"] == record["id"]
    assert line["migration"]["outcome"] == "committed"


def _log_lines(replica: str, containing: str) -> list[dict[str, Any]]:
    logs = Path("/tmp/ray/session_latest/logs/serve").glob(f"replica_mell_Engine_{replica}*")
    return [json.loads(line) for log in logs for line in log.read_text().splitlines() if containing in line]
