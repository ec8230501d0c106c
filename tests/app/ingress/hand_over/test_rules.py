"""Who may hand over to whom, and which requests stay."""

from dataclasses import replace
from typing import Any

import pytest

from app.ingress.hand_over.rules import PROTOCOL, Standing, served_by_both, why_refused, why_stays
from migration.protocol.core_messages import Adapter
from migration.protocol.request import ModelIdentity, Trait
from tests.migration.world import spec

URL = "http://new:8000"
OWN = Standing(PROTOCOL, "old", "tiny|v1", ("pooled",), None)
OTHER = Standing(PROTOCOL, "new", "tiny|v1", ("pooled", "seeded"), None)


def test_two_mells_with_one_model_agree() -> None:
    assert why_refused(URL, OWN, OTHER) is None
    assert served_by_both(OWN, OTHER) == ModelIdentity("tiny|v1", frozenset({Trait.POOLED, Trait.SEEDED}))


def test_an_order_may_be_repeated() -> None:
    assert why_refused(URL, replace(OWN, to=URL), OTHER) is None


@pytest.mark.parametrize(
    ("own", "other", "why"),
    [
        (
            {},
            {"protocol": PROTOCOL + 1},
            f"a newer Mell: it has version {PROTOCOL + 1} of hand-overs, and this one version {PROTOCOL}",
        ),
        ({}, {"protocol": PROTOCOL - 1}, "an older Mell"),
        ({}, {"id": "old"}, "is this Mell itself"),
        ({"to": "http://third:8000"}, {}, "this Mell hands over to http://third:8000: undo that first"),
        ({}, {"to": "http://old:8000"}, "hands its requests over to http://old:8000, and takes none"),
        ({"model": None}, {}, "no replica of this Mell has answered"),
        ({}, {"model": None}, "no replica of http://new:8000 has answered"),
        ({}, {"model": "tiny|v2"}, "There: tiny|v2; here: tiny|v1"),
        ({}, {"tied": ("dreamt",)}, "dreamt, which this Mell does not know"),
    ],
)
def test_others_are_refused_with_the_reason(own: dict[str, Any], other: dict[str, Any], why: str) -> None:
    assert why in (why_refused(URL, replace(OWN, **own), replace(OTHER, **other)) or "")


def test_a_standing_travels_with_other_members() -> None:
    assert Standing.parse(OTHER.document() | {"here": 3}) == OTHER


@pytest.mark.parametrize("missing", ["protocol", "id", "model", "tied", "to"])
def test_anything_else_is_no_standing(missing: str) -> None:
    document = OTHER.document()
    del document[missing]
    others: tuple[Any, ...] = (document, OTHER.document() | {missing: 1.5}, [], None)
    for other in others:
        with pytest.raises(ValueError, match="not that of a Mell"):
            Standing.parse(other)


def test_a_request_is_handed_over() -> None:
    assert why_stays(spec(), 7, {Trait.SEEDED}) is None


def test_a_request_with_an_adapter_stays() -> None:
    assert why_stays(replace(spec(), adapter=Adapter("sql", 1, "/sql")), 0, ()) == "LoRA adapter"


def test_a_request_that_either_cannot_continue_stays_once_it_has_output() -> None:
    seeded = replace(spec(), traits=frozenset({Trait.SEEDED, Trait.SCORED}))
    assert why_stays(seeded, 1, {Trait.SEEDED}) == "cannot be continued exactly: seeded"
    assert why_stays(seeded, 0, {Trait.SEEDED}) is None
    assert why_stays(seeded, 1, ()) is None
