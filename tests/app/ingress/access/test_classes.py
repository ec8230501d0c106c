"""The class of a call: by its header, its service tier, or its key; and refusals in OpenAI's shape."""

from typing import Any

import pytest

from app.ingress.access.classes import HEADER, ONE_CLASS, TIERS, ClassChooser
from app.ingress.errors import ApiError
from policies.precedence import ServiceClass, ServiceClasses

CLASSES = ServiceClasses({"batch": ServiceClass(-1), "chat": ServiceClass(1), "flex": ServiceClass(-2)})
CHOOSER = ClassChooser(CLASSES, {"priority": "chat"})


@pytest.mark.parametrize(
    ("header", "tier", "allowed", "expected"),
    [
        (None, None, (), "default"),
        ("", None, (), "default"),
        (None, None, ("batch", "chat"), "batch"),
        ("chat", None, (), "chat"),
        ("chat", None, ("batch", "chat"), "chat"),
        ("chat", "flex", (), "chat"),
        ("default", None, (), "default"),
        (None, "auto", (), "default"),
        (None, "auto", ("batch",), "batch"),
        (None, "default", (), "default"),
        (None, "standard_only", (), "default"),
        (None, "priority", (), "chat"),
        (None, "flex", (), "flex"),
        (None, "scale", (), "default"),
        (None, "scale", ("batch",), "batch"),
    ],
)
def test_the_class_of_a_call(header: str | None, tier: Any, allowed: tuple[str, ...], expected: str) -> None:
    assert CHOOSER.choose(header, tier, allowed) == expected


@pytest.mark.parametrize(
    ("header", "tier", "param", "known"),
    [
        ("gold", None, HEADER, "default, batch, chat, flex"),
        ("Chat", None, HEADER, "default, batch, chat, flex"),
        (None, "fast", "service_tier", ", ".join(TIERS)),
        (None, 5, "service_tier", ", ".join(TIERS)),
        (None, {"a": 1}, "service_tier", ", ".join(TIERS)),
        (None, ["auto"], "service_tier", ", ".join(TIERS)),
        ("x" * 10_000, None, HEADER, "default, batch, chat, flex"),
    ],
    ids=["unknown", "in capitals", "unknown tier", "a number", "an object", "a list", "long"],
)
def test_an_unknown_class_is_refused_with_the_known_ones(header: str | None, tier: Any, param: str, known: str) -> None:
    with pytest.raises(ApiError) as refused:
        CHOOSER.choose(header, tier, ())
    error = refused.value
    assert (error.status, error.param, error.code) == (400, param, "invalid_value")
    assert error.message.endswith(f"is not among {known}") and len(error.message) < 200


@pytest.mark.parametrize(
    ("header", "tier", "param"),
    [("chat", None, HEADER), (None, "priority", "service_tier"), (None, "default", "service_tier")],
)
def test_a_class_that_the_key_does_not_list_is_forbidden(header: str | None, tier: str | None, param: str) -> None:
    with pytest.raises(ApiError, match=r"may not use the class .*, only batch, flex") as refused:
        CHOOSER.choose(header, tier, ("batch", "flex"))
    assert (refused.value.status, refused.value.param, refused.value.code) == (403, param, "class_not_allowed")


@pytest.mark.parametrize(("header", "tier"), [("gold", None), (None, "fast"), (None, {"a": 1}), ("chat", "flex")])
def test_without_classes_neither_header_nor_tier_has_an_effect(header: str | None, tier: Any) -> None:
    assert ONE_CLASS.choose(header, tier, ()) == "default"
