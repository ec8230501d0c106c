"""A policy name selects code, and text sets the options that the policy has, or is refused."""

import pytest

from policies.rules.best_fit import BestFit
from policies.rules.load_balance import LoadBalance
from policies.rules.mell import mell, mell_repaired
from policies.rules.options import Option
from policies.rules.overload import Overload
from policies.rules.pack import Pack
from policies.rules.policy import Policy
from policies.rules.registry import POLICIES, ConfigurablePolicy, options, policy, sets_headroom
from policies.rules.worst_fit import WorstFit

every_option = pytest.mark.parametrize(
    ("name", "option"),
    [pytest.param(name, option, id=f"{name}-{option.name}") for name, of in options().items() for option in of],
)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("best_fit", BestFit()),
        ("worst_fit", WorstFit()),
        ("load_balance", LoadBalance()),
        ("best_fit:headroom_s=2.5", BestFit(headroom_s=2.5)),
        ("best_fit:headroom_s=0", BestFit(headroom_s=0.0)),
        ("worst_fit:overload=stall,headroom_s=4", WorstFit(headroom_s=4.0, overload=Overload.STALL)),
        ("load_balance:drain=true,spare=1", LoadBalance(drain=True, spare=1.0)),
        ("load_balance:drain=false", LoadBalance()),
    ],
)
def test_text_selects_a_policy(spec: str, expected: Policy) -> None:
    assert policy(spec) == expected


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "there is no policy '', only best_fit, worst_fit, load_balance, .*"),
        ("first_fit", "there is no policy 'first_fit', only best_fit, worst_fit, load_balance, .*"),
        ("best_fit:tau=4", "best_fit has no option 'tau', only headroom_s, overload"),
        ("best_fit:", "best_fit: '' is not of the form option=value"),
        ("best_fit:overload", "best_fit: 'overload' is not of the form option=value"),
        ("best_fit:overload=stall,overload=stall", "best_fit: overload is given twice"),
        ("best_fit:overload=drop", "best_fit: overload must be evict or stall, not 'drop'"),
        ("best_fit:headroom_s=-1", "best_fit: headroom_s must be a number of at least 0, not '-1'"),
        ("best_fit:headroom_s=nan", "best_fit: headroom_s must be a number of at least 0, not 'nan'"),
        ("best_fit:headroom_s=inf", "best_fit: headroom_s must be a number of at least 0, not 'inf'"),
        ("best_fit:headroom_s=much", "best_fit: headroom_s must be a number of at least 0, not 'much'"),
        ("load_balance:drain=1", "load_balance: drain must be true or false, not '1'"),
        ("load_balance:spare=1.1", "load_balance: spare must be a number of at least 0 and at most 1, not '1.1'"),
    ],
)
def test_errors_name_the_mistake(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        policy(spec)


def test_every_policy_of_the_evaluation_has_its_name() -> None:
    expected: dict[str, ConfigurablePolicy] = {
        "best_fit": BestFit(),
        "worst_fit": WorstFit(),
        "load_balance": LoadBalance(),
        "mell": mell(),
        "mell_repaired": mell_repaired(),
        "pack": Pack(),
    }
    assert list(POLICIES) == list(expected) and dict(POLICIES) == expected


def test_a_headroom_is_set_if_no_policy_of_this_class_has_it_by_default() -> None:
    assert [name for name in POLICIES if sets_headroom(POLICIES[name])] == []
    assert not sets_headroom(mell_repaired(0.0)) and sets_headroom(mell_repaired(3.0)) and sets_headroom(Pack(4.0))


@pytest.mark.parametrize("name", POLICIES)
def test_a_name_selects_code_of_its_own(name: str) -> None:
    assert [other for other in POLICIES if policy(other) == policy(name)] == [name]


@pytest.mark.parametrize(
    ("option", "text", "allowed"),
    [
        (Option("n", int, 3, "", least=1), "2.0", "a whole number of at least 1"),
        (Option("n", int, 3, "", most=5), "6", "a whole number of at most 5"),
        (Option("x", float, 0.5, ""), "", "a number"),
    ],
)
def test_numbers_are_bounded(option: Option, text: str, allowed: str) -> None:
    assert option.read(str(option.default)) == option.default
    with pytest.raises(ValueError, match=f"must be {allowed}, not"):
        option.read(text)


@every_option
def test_every_option_has_a_description(name: str, option: Option) -> None:
    assert option.doc.endswith("."), f"{name}: {option.name} has no sentence"


@every_option
def test_every_default_can_be_written_as_text(name: str, option: Option) -> None:
    text = str(option.default).lower()
    assert option.read(text) == option.default
    assert policy(f"{name}:{option.name}={text}") == POLICIES[name]
