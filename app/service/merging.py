"""The documents of several models as one: `/mell/state` and `/mell/migrations`. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_COMMON = ("mode", "configured_mode", "policy", "fence")
"""The members of a state that all models have in common."""
_OF_ALL = (*_COMMON, "replicas", "devices")
"""The members that are not a model's own."""
_SUMS = ("wanted_replicas", "min_replicas", "max_replicas", "least_replicas")


def merge_states(states: Mapping[str, dict[str, Any]], names: Mapping[str, Iterable[str]]) -> dict[str, Any]:
    """The state of an application, from those of its models by id, and the names of the models in calls.

    The state of one model is the application's.

    The replicas of all models stand at the top, each with its `model`. The other members of each model are in `models`,
    and numbers of replicas at the top are sums.
    """
    states = {model: {"names": sorted(names[model])} | state for model, state in states.items()}
    documents = list(states.values())
    if len(documents) == 1:
        return documents[0]
    first = documents[0]
    merged = {"as_of": min(state["as_of"] for state in documents)} | {name: first[name] for name in _COMMON}
    for name in _SUMS:
        if all(name in state for state in documents):
            merged[name] = sum(state[name] for state in documents)
    replicas = [replica | {"model": model} for model, state in states.items() for replica in state["replicas"]]
    merged["resting_pairs"] = [pair for state in documents for pair in state["resting_pairs"]]
    merged["models"] = [
        {"model": model} | {name: value for name, value in state.items() if name not in _OF_ALL}
        for model, state in states.items()
    ]
    if "devices" in first:
        merged["devices"] = _devices(first["devices"], {replica["id"]: replica["model"] for replica in replicas})
    return merged | {"replicas": sorted(replicas, key=lambda replica: str(replica["id"]))}


def _devices(devices: Sequence[Mapping[str, Any]], models: Mapping[str, str]) -> list[dict[str, Any]]:
    """The devices, which all models share, with the model of each replica in `models`."""
    return [
        {
            **device,
            "seats": [
                seat | ({"model": models[seat["replica"]]} if seat["replica"] in models else {})
                for seat in device["seats"]
            ],
        }
        for device in devices
    ]


def merge_migrations(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The migrations of all models, newest first."""
    if len(documents) == 1:
        return documents[0]
    records = [record for document in documents for record in document["migrations"]]
    return {"migrations": sorted(records, key=lambda record: float(record["started_at"]), reverse=True)}


def of_several(state: Mapping[str, Any], reference: str) -> list[dict[str, Any]]:
    """The requests with this id or label, as candidates for an order, if several models have one."""
    found = [
        (replica.get("model"), {"id": request["id"], "label": request["label"], "replica": replica["id"]})
        for replica in state["replicas"]
        for request in replica["requests"]
        if reference in (request["id"], request["label"])
    ]
    return [candidate for _, candidate in found] if len({model for model, _ in found}) > 1 else []
