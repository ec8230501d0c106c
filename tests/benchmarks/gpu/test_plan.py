"""The plan keeps to its times, and asks for servers that can start and hold the streams that are sent to them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.settings import Settings
from benchmarks.gpu.faults import Strike
from benchmarks.gpu.moving import MeasureMoves, MeasureNeighbours
from benchmarks.gpu.plan import FIRST, FIRST_S, PART_S, RunPart, ServerSet, full_plan, next_part, short_plan
from benchmarks.gpu.serving import MeasureServing
from benchmarks.instruments.moved import STOP_AND_COPY
from benchmarks.servers import Rig


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Models are not generated."""
    monkeypatch.setattr("benchmarks.instruments.models.tinymodel.ensure_generated", lambda name, make: tmp_path / name)


GPU, GPUS, CPU = Rig.on_gpus(1), Rig.on_gpus(2), Rig()


def every_part() -> Iterator[RunPart]:
    for rig in (GPU, GPUS, CPU):
        yield from full_plan(rig)
        yield from short_plan(rig)


def test_parts_keep_to_the_times() -> None:
    assert all(part.limit_s <= PART_S for part in every_part())
    for rig in (GPU, CPU):
        assert sum(part.limit_s for part in full_plan(rig)[:FIRST]) <= FIRST_S
        assert [part.name.split("-")[0] for part in full_plan(rig)[:FIRST]] == ["serving", "moves", "texts"]
    assert len({part.name for part in full_plan(GPUS)}) == len(full_plan(GPUS))


def test_nccl_needs_two_gpus() -> None:
    assert [part.name for part in full_plan(GPUS)] == [*(part.name for part in full_plan(GPU)), "nccl"]


def test_no_two_parts_have_the_same_servers() -> None:
    for rig in (GPUS, CPU):
        servers = [part.servers for part in full_plan(rig) if part.servers is not None]
        assert all(one != other for i, one in enumerate(servers) for other in servers[:i])


def test_a_drain_or_a_kill_is_the_last_step() -> None:
    struck = [part.steps for part in every_part() if any(isinstance(step, Strike) for step in part.steps)]
    assert len(struck) > 4
    for steps in struck:
        assert [isinstance(step, Strike) for step in steps] == [False] * (len(steps) - 1) + [True]


def test_servers_settings_are_valid() -> None:
    checked = 0
    for part in every_part():
        if part.servers is not None:
            Settings.model_validate(part.servers.shared_rig.mell_settings() | {"migration": part.servers.settings})
            checked += 1
    assert checked > 10


def test_engines_of_a_gpu_fit_into_it() -> None:
    weights = {"8b": 16.1, "small": 0.5, "tiny": 0.1}
    for part in full_plan(GPU):
        if part.servers is not None:
            rig = part.servers.shared_rig
            needed = rig.engines * (rig.kv_gib + weights[rig.model] + 5)
            assert needed < 79, part.name
            assert rig.engines == part.servers.replicas + part.servers.bare


def test_streams_fit_into_contexts_and_caches() -> None:
    for part in every_part():
        for step in part.steps:
            if part.servers is None:
                continue
            rig = part.servers.shared_rig
            cache = rig.kv_gib * (1 << 30) / rig.kv_bytes if rig.device == "cuda" else 1023 * 32
            if isinstance(step, MeasureMoves):
                assert max(step.contexts) + step.output <= min(rig.context, cache)
            if isinstance(step, MeasureNeighbours):
                assert step.context + step.output <= rig.context
                assert step.context + step.output + 2 * step.per_replica * 4032 <= 2 * cache
            if isinstance(step, MeasureServing):
                assert max(step.streams) * (step.prompt + step.output) <= cache
                assert max(step.streams) <= rig.engine_kwargs["max_num_seqs"]


def test_serving_is_measured_at_16_64_and_256_streams() -> None:
    (serving,) = [step for part in full_plan(GPU) for step in part.steps if isinstance(step, MeasureServing)]
    assert tuple(serving.streams) == (16, 64, 256)


def test_texts_are_compared_with_and_without_invariance() -> None:
    rigs = [part.servers.rig for part in full_plan(GPU) if part.name.startswith("texts") and part.servers]
    assert [rig.invariant for rig in rigs] == [True, False] and {rig.model for rig in rigs} == {"small"}


def test_short_plan_has_every_step_with_servers() -> None:
    (short,) = short_plan(CPU)
    full = {type(step) for part in full_plan(GPUS) if part.servers for step in part.steps}
    assert {type(step) for step in short.steps} == full


def test_conditions_name_what_a_part_sets() -> None:
    by_name = {part.name: part.servers.conditions for part in full_plan(GPU) if part.servers}
    assert by_name["moves"].endswith("2 engines on 1 GPU; cuda_ipc, 4 slots of 64 MiB")
    assert by_name["shared"].endswith("shared, 4 slots of 64 MiB")
    stop = ServerSet(GPU, 2, migration=STOP_AND_COPY | {"slots": 5, "slot_mib": 256})
    assert stop.conditions.endswith("cuda_ipc, 5 slots of 256 MiB, max_rounds: 0, final_blocks: 0")
    assert stop.gpu_slots_mib == 1280 and short_plan(CPU)[0].servers.gpu_slots_mib == 0  # type: ignore[union-attr]
    assert "batch-invariant; 3 engines on 1 GPU" in by_name["texts-invariant"]
    (short,) = short_plan(CPU)
    assert short.servers is not None and short.servers.conditions.endswith("on the CPU; shared, 4 slots of 8 MiB")


@pytest.mark.parametrize(
    ("done", "left_s", "expected"),
    [
        (set(), 400, ("a", 300)),
        (set(), 200, ("a", 200)),
        (set(), 149, None),
        ({"a"}, 149, ("b", 100)),
        ({"a"}, 60, ("b", 60)),
        ({"a", "b"}, 400, None),
    ],
    ids=["whole", "in what is left", "too little for a start", "without servers", "the rest", "all done"],
)
def test_next_part_fits_into_what_is_left(done: set[str], left_s: float, expected: tuple[str, float] | None) -> None:
    parts = [RunPart("a", "", 300, (), ServerSet(CPU, 2)), RunPart("b", "", 100, ())]
    found = next_part(parts, done, left_s)
    assert (found and (found.name, found.limit_s)) == expected
