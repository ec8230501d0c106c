"""The order of a command line, and the errors for impossible ones."""

import re
from pathlib import Path

import pytest

from policies.cost.service import ServiceLevel
from policies.decision.limits import Limits
from policies.precedence import ServiceClass, ServiceClasses
from simulator.command.options import parser
from simulator.command.order import SimulationOrder, read_order
from simulator.errors import BadInput
from simulator.workload.workload import Poisson, draw
from tests.simulator.replay.make_small_trace import PATH

TRACE = ("--trace", str(PATH), "--warmup", "0")
POISSON = ("--poisson", "1", "--lengths", "quantiles")
POLICY = ("--policy", "best_fit")


def order(*argv: str) -> SimulationOrder:
    return read_order(parser().parse_args(argv))


def test_every_option_but_the_workload_and_the_policy_has_a_default() -> None:
    plain = order(*POISSON, *POLICY)
    assert plain.recipe.arrivals == Poisson(1.0)
    assert (plain.setup.capacity, plain.setup.decode_rate, plain.setup.epoch_s) == (13698, 25.0, 1.0)
    assert (plain.window.warmup_s, plain.window.horizon_s) == (600.0, 3600.0)
    assert (plain.setup.gpus_per_node, plain.setup.max_gpus, plain.setup.batched) == (8, None, True)
    assert (plain.setup.limits, plain.seeds, plain.json) == (Limits(), (0,), None)


def test_a_trace_is_simulated_to_its_end() -> None:
    last_s = draw(order(*TRACE, *POLICY).recipe, 0).jobs[-1].arrival_s
    assert order(*TRACE, *POLICY).window.horizon_s == int(last_s) + 1
    assert order(*TRACE, *POLICY, "--time-scale", "2", "--epoch", "5").window.horizon_s == 90


def test_options_reach_the_setup() -> None:
    limits = ("--moves-per-epoch", "4", "--cooldown", "5", "--headroom", "6")
    setup = order(*TRACE, *POLICY, "--max-gpus", "3", "--gpus-per-node", "2", "--unbatched", *limits).setup
    assert (setup.max_gpus, setup.gpus_per_node, setup.batched) == (3, 2, False)
    assert setup.limits == Limits(moves_per_epoch=4, cooldown_s=5, headroom_s=6)


@pytest.mark.parametrize(("number", "by_machine"), [(1, False), (4, True)])
def test_a_machine_is_a_node_that_is_counted_if_it_has_several_gpus(number: int, by_machine: bool) -> None:
    setup = order(*TRACE, *POLICY, "--gpus-per-machine", str(number)).setup
    assert (setup.gpus_per_node, setup.by_machine) == (number, by_machine)
    assert not order(*TRACE, *POLICY, "--gpus-per-node", str(number)).setup.by_machine


def test_number_of_gpus_for_prefills_is_given_or_decided_up_to_a_maximum() -> None:
    given = ("--prefill-gpus", "2")
    for auto in (False, True):
        setup = order(*TRACE, *POLICY, *given, *(["--auto-prefills"] if auto else [])).setup
        assert (setup.prefill_gpus, setup.auto_prefills) == (2, auto)
    with pytest.raises(BadInput, match="--auto-prefills needs --prefill-gpus N"):
        order(*TRACE, *POLICY, "--auto-prefills")


def test_classes_have_ranks_shares_and_levels() -> None:
    given = ("--class", "chat:rank=2,share=0.25,itl_p99=50", "--class", "batch", "--overtake", "7")
    made = order(*POISSON, *POLICY, "--costs", "a100-40g-13b-pcie", *given)
    classes = {"chat": ServiceClass(2, ServiceLevel(None, 0.05)), "batch": ServiceClass()}
    assert made.setup.classes == ServiceClasses(classes, 7.0)
    assert made.recipe.shares == {"chat": 0.25, "batch": 0.0}


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ("--class chat:rank=x", "'rank=x' is none of rank=N, share=X, ttft_p99=S and itl_p99=MS"),
        ("--class chat:rang=1", "'rang=1' is none of"),
        ("--class chat:share=-1", "'share=-1' is none of"),
        ("--class chat:rank=1.5", "write NAME:rank=N with a whole number"),
        ("--class :rank=1", "write NAME:rank=N"),
        ("--class chat --class chat", "--class chat is given twice"),
        ("--class a:share=0.6 --class b:share=0.6", "The shares of the classes add up to more than 1"),
        ("--class chat:itl_p99=50", "a level needs --costs"),
        ("--costs a100-40g-13b-pcie --class chat:itl_p99=1", "its level cannot be met: itl_p99_ms is 1"),
        ("--costs a100-40g-13b-pcie --class default:itl_p99=50", "is --ttft-p99 and --itl-p99"),
        ("--overtake -1", "overtaking time"),
    ],
)
def test_impossible_classes_are_refused(argv: str, problem: str) -> None:
    with pytest.raises(BadInput, match=re.escape(problem)):
        order(*POISSON, *POLICY, *argv.split())


def test_a_class_of_the_trace_must_be_given(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,class\n0,10,1,chat\n")
    trace = ("--trace", str(path), "--warmup", "0", *POLICY)
    with pytest.raises(BadInput, match="The trace has the class chat: give --class chat:rank=N"):
        order(*trace)
    assert order(*trace, "--class", "chat:rank=1").setup.classes.rank("chat") == 1


def test_a_service_level_is_in_seconds() -> None:
    costs = ("--costs", "a100-40g-13b-pcie")
    assert order(*POISSON, *POLICY, *costs).setup.service is None
    level = order(*POISSON, *POLICY, *costs, "--ttft-p99", "2", "--itl-p99", "50").setup.service
    assert level == ServiceLevel(2.0, 0.05)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ("--ttft-p99 2", "needs --costs with the times of decoding and of prefills"),
        ("--costs a100-40g-13b-pcie --ttft-p99 0", "The --ttft-p99 must be a number greater than 0"),
        (
            "--costs a100-40g-13b-pcie --itl-p99 20",
            "cannot be met: itl_p99_ms is 20, and a step with one request of 1 tokens takes 25.7 ms",
        ),
    ],
)
def test_an_impossible_service_level_is_refused(argv: str, problem: str) -> None:
    with pytest.raises(BadInput, match=re.escape(problem)):
        order(*POISSON, *POLICY, *argv.split())


@pytest.mark.parametrize(
    ("argv", "seeds"),
    [
        ("", (0,)),
        ("--seed 7", (7,)),
        ("--seed 7 --seed 3 --seed 7", (7, 3)),
        ("--seeds 3", (0, 1, 2)),
        ("--seed 7 --seeds 2", (7, 8)),
    ],
)
def test_seeds_are_listed_or_counted(argv: str, seeds: tuple[int, ...]) -> None:
    assert order(*TRACE, *POLICY, *argv.split()).seeds == seeds


def test_every_policy_meets_every_workload_once() -> None:
    both = order(*POISSON, *POLICY, "--policy", "worst_fit", *POLICY, "--seeds", "2")
    runs = both.runs([draw(both.recipe, seed) for seed in both.seeds])
    assert [(run.policy, run.seed) for run in runs] == [
        (policy, seed) for policy in (None, "best_fit", "worst_fit") for seed in (0, 1)
    ]


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ("", "Give either --trace FILE or --poisson RATE."),
        (f"--trace {PATH} --poisson 1", "Give either --trace FILE or --poisson RATE."),
        ("--trace nowhere.csv", "nowhere.csv cannot be read: No such file or directory."),
        ("--poisson 1", "Poisson arrivals have no lengths of their own: give --lengths or --sessions."),
        ("--poisson -1 --lengths quantiles", "The Poisson rate must be a number greater than 0, got -1."),
        ("--poisson nan --lengths quantiles", "The Poisson rate must be a number greater than 0, got nan."),
        ("--poisson 1 --lengths nowhere", "nowhere cannot be read: No such file or directory."),
    ],
)
def test_a_workload_that_cannot_be_made_is_refused(argv: str, complaint: str) -> None:
    with pytest.raises(BadInput) as refusal:
        order(*argv.split(), *POLICY)
    assert str(refusal.value) == complaint


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ("--capacity-tokens 7", "capacity must be 8 tokens or more, got 7"),
        ("--length-scale 0", "length scale must be a number greater than 0, got 0"),
        ("--time-scale inf", "time scale must be a number greater than 0, got inf"),
        ("--horizon 0", "horizon must be a number greater than 0, got 0"),
        ("--horizon 0.5", "The horizon of 0.5 s ends before the first epoch of 1 s"),
        ("--warmup 45", "A warm-up of 45 s leaves nothing to measure of 45 s"),
        ("--warmup -1", "warm-up must be 0 or more, got -1"),
        ("--epoch 0", "epoch must be a number greater than 0, got 0"),
        ("--decode-rate -25", "decode rate must be a number greater than 0, got -25"),
        ("--decode-rate 0.5", "At 0.5 tokens/s a request gets no token in an epoch of 1 s"),
        ("--gpus-per-node 0", "number of GPUs per node must be 1 or more, got 0"),
        ("--gpus-per-machine 0", "number of GPUs per machine must be 1 or more, got 0"),
        ("--max-gpus 0", "number of GPUs must be 1 or more, got 0"),
        ("--moves-per-epoch -1", "number of moves per epoch must be 0 or more, got -1"),
        ("--cooldown -1", "cooldown must be 0 or more"),
        ("--headroom nan", "headroom must be 0 or more"),
        ("--processes 0", "number of processes must be 1 or more"),
        ("--seeds 0", "number of seeds must be 1 or more"),
        ("--seed 1 --seed 2 --seeds 2", "--seeds N counts from one --seed"),
        ("--costs nowhere.json", r"nowhere\.json: No such file"),
        ("--calibration nowhere.json", r"nowhere\.json"),
        ("--json nowhere/out.json", "out.json cannot be written: there is no directory nowhere"),
        ("--policy nonsense", "--policy nonsense: there is no policy 'nonsense'"),
        ("--policy load_balance:drain=perhaps", "drain must be true or false, not 'perhaps'"),
    ],
)
def test_options_that_are_impossible_are_refused(argv: str, complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        order(*TRACE, *POLICY, *argv.split())


def test_without_a_policy_nothing_is_simulated() -> None:
    with pytest.raises(BadInput, match="Give a --policy; --list-policies lists them"):
        order(*TRACE)


def test_a_folder_is_no_place_for_the_outcome(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be written"):
        order(*TRACE, *POLICY, "--json", str(tmp_path))
