"""From profiles to a cost file, with profiles of which the truth is known."""

from pathlib import Path

import pytest

from simulator.calibrate import OVERHEAD_S, READS, main
from simulator.costs.costs import ComputeCosts, Costs, MigrationCosts, read_costs
from simulator.costs.hardware import GPUS, MODELS, STATED_LINKS

MODEL, GPU = "Llama-2-7b-hf", "a100"
SIZES = [1, 2, 60, 64, 128, 250, 256, 512, 1024, 2048, 4096]


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    """Steps of 10 ms and 0.1 ms per token above 64; links of 1 GB/s and 100 MB/s with 20 us; one wild measurement."""
    linear = [(n, 10 + 0.1 * max(0, n - 64)) for n in SIZES] + [(256, 999.0)]
    _write(
        tmp_path / f"vidur_linear_{GPU}_{MODEL}.csv",
        "tensor_parallel,num_tokens,layer_ms,model_ms",
        [f"1,{n},0,{ms}" for n, ms in linear] + ["2,1,0,1.0"],
    )
    sizes = [2048 * 2**k for k in range(16)]
    _write(
        tmp_path / "vidur_sendrecv_box.csv",
        "devices_per_node,bytes,median_ms,GB_per_s",
        [f"{nodes},{size},{0.02 + size / speed},0" for nodes, speed in ((2, 1e6), (1, 1e5)) for size in sizes],
    )
    _write(
        tmp_path / "apex_sendrecv_card.csv",
        "gpu,num_nodes,num_gpus_per_node,dtype,size(kb),time(us)",
        [f"card,1,2,half,{size // 1024},{7 + size / 1e3}" for size in sizes],
    )
    _write(
        tmp_path / "splitwise_perf.csv",
        "model,hardware,tensor_parallel,prompt_size,batch_size,prompt_ms,token_ms",
        [f"llama2-70b,h100-80gb,4,{n},1,{n / 10},30" for n in (128, 512, 1024, 2048)]
        + [f"llama2-70b,h100-80gb,4,512,{batch},9999,{30 + batch / 10}" for batch in (2, 32, 64)],
    )
    return tmp_path


def _write(path: Path, header: str, rows: list[str]) -> None:
    path.write_text("\n".join([header, *rows]) + "\n")


def fitted(profiles: Path, *options: str, model: str = MODEL, gpu: str = GPU, link: str = "box") -> Costs:
    """The costs that the command writes."""
    out = profiles / "costs.json"
    given = ["--profiles", str(profiles), "--model", model, "--gpu", gpu, "--link", link, "--out", str(out)]
    assert main([*given, *options]) == 0
    return read_costs(str(out))


def compute(costs: Costs) -> ComputeCosts:
    """The step times; there must be some."""
    assert costs.compute
    return costs.compute


def migration(costs: Costs) -> MigrationCosts:
    """The costs of moves; there must be some."""
    assert costs.migration
    return costs.migration


def test_step_times_are_those_of_the_profile_wild_ones_left_out(profiles: Path) -> None:
    linear = dict(compute(fitted(profiles)).linear)
    assert linear.keys() == {1, 64, 128, 256, 512, 1024, 2048, 4096}
    assert (linear[1], linear[64], linear[256], linear[4096]) == pytest.approx((0.01, 0.01, 0.0289, 0.4132), rel=0.02)


def test_links_are_fitted_within_nodes_and_between_them(profiles: Path) -> None:
    moves = migration(fitted(profiles))
    assert (moves.intra.bytes_per_s, moves.inter.bytes_per_s) == pytest.approx((1e9, 1e8), rel=0.01)
    assert (moves.intra.latency_s, moves.inter.latency_s) == pytest.approx((2e-5, 2e-5), rel=0.05)


def test_links_of_another_kind_of_profile_and_stated_ones(profiles: Path) -> None:
    moves = migration(fitted(profiles, "--uplink", "10gbe", link="card"))
    assert moves.intra.bytes_per_s == pytest.approx(1e9, rel=0.01)
    assert moves.inter == STATED_LINKS["10gbe"]


def test_costs_without_a_profile_follow_from_the_model_and_the_gpu(profiles: Path) -> None:
    costs = fitted(profiles)
    assert migration(costs).kv_bytes == 2 * 32 * 4096 * 2
    assert compute(costs).context_s == pytest.approx(524288 / (GPUS[GPU].bytes_per_s * READS), rel=1e-3)
    assert compute(costs).overhead_s == OVERHEAD_S
    assert costs.provenance["compute.linear"].startswith("measured: Llama-2-7b-hf on a100")
    assert costs.provenance["migration.intra"] == "measured: box"


def test_another_model_and_gpu_are_scaled_from_the_profile(profiles: Path) -> None:
    own, other = (
        dict(compute(fitted(profiles)).linear),
        fitted(profiles, "--measured-model", MODEL, "--measured-gpu", GPU, model="Llama-2-13b-hf", gpu="a100-40g"),
    )
    linear, bigger = dict(compute(other).linear), MODELS["Llama-2-13b-hf"].parameters / MODELS[MODEL].parameters
    assert linear[1] == pytest.approx(own[1] * bigger * 2.039 / 1.555, rel=1e-3)
    assert linear[4096] - linear[2048] == pytest.approx((own[4096] - own[2048]) * bigger, rel=1e-2)
    assert "scaled by 2.533" in other.provenance["compute.linear"]


def test_whole_steps_need_nothing_added(profiles: Path) -> None:
    costs = compute(fitted(profiles, "--tensor-parallel", "4", model="llama2-70b", gpu="h100"))
    assert dict(costs.linear) == pytest.approx(
        {1: 0.03, 64: 0.0364, 128: 0.0364, 512: 0.0512, 1024: 0.1024, 2048: 0.2048}
    )
    assert (costs.overhead_s, costs.attention_s) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"--model": "gpt"}, "There is no model gpt"),
        ({"--gpu": "b200"}, "There is no GPU b200"),
        ({"--gpu": "h200"}, "There is no profile of Llama-2-7b-hf on h200"),
        ({"--tensor-parallel": "8"}, "with tensor parallel 8"),
        ({"--tensor-parallel": "2"}, "too few step times"),
        ({"--link": "rope"}, "There is no profile of a link rope"),
        ({"--link": "card"}, "has no transfers between nodes"),
        ({"--startup-s": "-1"}, "start-up time must be 0 or more"),
        ({"--out": "/nowhere/costs.json"}, "No such file"),
    ],
)
def test_the_impossible_is_answered_with_a_sentence(
    profiles: Path, capsys: pytest.CaptureFixture[str], options: dict[str, str], complaint: str
) -> None:
    given = {
        "--profiles": str(profiles),
        "--model": MODEL,
        "--gpu": GPU,
        "--link": "box",
        "--out": str(profiles / "c.json"),
    } | options
    assert main([word for pair in given.items() for word in pair]) == 2
    assert complaint in capsys.readouterr().err


def test_a_profile_without_a_column_is_refused(profiles: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(profiles / "vidur_sendrecv_bad.csv", "devices_per_node,bytes", ["1,2"])
    given = ["--profiles", str(profiles), "--model", MODEL, "--gpu", GPU, "--link", "bad", "--out", "c.json"]
    assert main(given) == 2
    assert "has no column median_ms" in capsys.readouterr().err
