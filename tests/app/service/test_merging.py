"""The documents of several models as one."""

from typing import Any

from app.service.merging import merge_migrations, merge_states, of_several


def _state(as_of: float, *replicas: str, **others: Any) -> dict[str, Any]:
    common = {"mode": "act", "configured_mode": "act", "policy": "pack", "fence": 4}
    own = {"wanted_replicas": 2, "min_replicas": 1, "max_replicas": 3, "resting_pairs": [], "routing": {"kind": "tree"}}
    return {"as_of": as_of, **common, **own, "replicas": [{"id": id} for id in replicas], **others}


NAMES = {"chat": ["chat-1b", "chat"], "code": ["code"]}


def test_the_state_of_one_model_is_that_of_the_application() -> None:
    state = _state(1.0, "a", "b")
    assert merge_states({"chat": state}, NAMES) == state | {"names": ["chat", "chat-1b"]}
    document = {"migrations": [{"id": "m"}]}
    assert merge_migrations([document]) is document


def test_replicas_stand_at_the_top_with_their_models() -> None:
    service = {"state": "held"}
    merged = merge_states({"chat": _state(2.0, "c", "a", service=service), "code": _state(1.0, "b")}, NAMES)
    assert [(r["id"], r["model"]) for r in merged["replicas"]] == [("a", "chat"), ("b", "code"), ("c", "chat")]
    assert (merged["as_of"], merged["mode"], merged["fence"], merged["policy"]) == (1.0, "act", 4, "pack")
    assert (merged["wanted_replicas"], merged["min_replicas"], merged["max_replicas"]) == (4, 2, 6)
    chat, code = merged["models"]
    assert (chat["model"], chat["service"], chat["routing"], chat["wanted_replicas"]) == (
        "chat",
        service,
        {"kind": "tree"},
        2,
    )
    assert (chat["names"], code["names"]) == (["chat", "chat-1b"], ["code"]) and "names" not in merged
    assert code["model"] == "code" and "service" not in code
    assert "service" not in merged and "replicas" not in chat


def test_the_fewest_replicas_are_a_sum_of_what_is_known_of_all() -> None:
    known = [_state(1.0, least_replicas=2), _state(1.0, least_replicas=3)]
    assert merge_states({"chat": known[0], "code": known[1]}, NAMES)["least_replicas"] == 5
    assert "least_replicas" not in merge_states({"chat": known[0], "code": _state(1.0)}, NAMES)


def test_migrations_are_ordered_over_all_models() -> None:
    documents = [{"migrations": [{"id": id, "started_at": at} for id, at in found]} for found in (
        [("d", 4.0), ("a", 1.0)],
        [("c", 3.0), ("b", 2.0)],
    )]  # fmt: skip
    assert [record["id"] for record in merge_migrations(documents)["migrations"]] == ["d", "c", "b", "a"]


def test_a_label_of_several_models_names_no_request() -> None:
    def replica(id: str, model: str, *requests: tuple[str, str]) -> dict[str, Any]:
        return {"id": id, "model": model, "requests": [{"id": of, "label": label} for of, label in requests]}

    state = {"replicas": [replica("a", "chat", ("1", "x"), ("2", "y"), ("3", "y")), replica("b", "code", ("4", "x"))]}
    assert of_several(state, "x") == [
        {"id": "1", "label": "x", "replica": "a"},
        {"id": "4", "label": "x", "replica": "b"},
    ]
    assert of_several(state, "y") == of_several(state, "4") == of_several(state, "5") == [], "the pool answers"


def test_devices_are_of_all_models_and_their_parts_have_models() -> None:
    devices = [{"id": "n", "budget_mib": 9, "seats": [{"replica": "a"}, {"replica": "b"}, {"replica": "new"}]}]
    states = {"chat": _state(2.0, "a", devices=devices), "code": _state(1.0, "b", devices=devices)}
    merged = merge_states(states, NAMES)
    seats = [{"replica": "a", "model": "chat"}, {"replica": "b", "model": "code"}, {"replica": "new"}]
    assert merged["devices"] == [{"id": "n", "budget_mib": 9, "seats": seats}]
    assert all("devices" not in model for model in merged["models"])
