"""The report of a run, as a JSON document and as a table; pure."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from benchmarks.chaos.answers import GOOD, StreamVerdict
from benchmarks.chaos.faults import FaultKind
from benchmarks.chaos.injector import NOTHING, InjectedFault
from benchmarks.chaos.run import ChaosResult, Judged


def is_good(result: ChaosResult) -> bool:
    """True if every stream ended as promised, and nothing leaked."""
    return not result.leaks and all(judged.verdict in GOOD for judged in result.judged)


def make_document(result: ChaosResult, options: dict[str, Any]) -> dict[str, Any]:
    """The result without its good answers."""
    return {
        "options": options,
        "good": is_good(result),
        "streams": dict(Counter(judged.verdict for judged in result.judged)),
        "faults": {kind: _kind_summary(kind, result) for kind in FaultKind},
        "leaks": result.leaks,
        "bad": [_bad_stream(judged) for judged in result.judged if judged.verdict not in GOOD],
        "strikes": [_flat(fault) for fault in result.injected],
    }


def _kind_summary(kind: FaultKind, result: ChaosResult) -> dict[str, Any]:
    """One kind of fault: the numbers drawn and injected, their outcomes, and the verdicts of the streams hit.

    A stream counts for each fault that hit it.
    """
    injected = [injected for injected in result.injected if injected.fault.kind is kind]
    hit = {label for injected in injected if injected.outcome != NOTHING for label in injected.hit}
    return {
        "drawn": len(injected),
        "struck": sum(fault.outcome != NOTHING for fault in injected),
        "outcomes": dict(Counter(injected.outcome for injected in injected)),
        "streams": dict(Counter(judged.verdict for judged in result.judged if judged.offer.label in hit)),
    }


def _bad_stream(judged: Judged) -> dict[str, Any]:
    offer, answer = asdict(judged.offer), asdict(judged.answer)
    return {"verdict": judged.verdict, "what": judged.what, "offer": offer, "heard": answer}


def _flat(injected: InjectedFault) -> dict[str, Any]:
    members = asdict(injected)
    return {**members.pop("fault"), **members}


def render(document: dict[str, Any]) -> str:
    """The document as a page of text."""
    return "\n".join(_lines(document))


def _lines(document: dict[str, Any]) -> Iterator[str]:
    yield f"{'':12}{'drawn':>7}{'injected':>10}   streams hit: " + ", ".join(StreamVerdict)
    for kind, summary in document["faults"].items():
        yield f"{kind:12}{summary['drawn']:7}{summary['struck']:10}   {_counts(summary['streams'])}"
        yield from (f"{'':32}{count} x {outcome}" for outcome, count in sorted(summary["outcomes"].items()))
    yield f"{'all streams':32}{_counts(document['streams'])}"
    for bad in document["bad"]:
        yield f"BAD: {bad['offer']['label']}: {bad['verdict']}: {bad['what']}"
    yield from (f"LEAK: {leak}" for leak in document["leaks"])
    yield "every stream ended as promised, nothing leaked" if document["good"] else "NOT as promised"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in StreamVerdict if verdict in counts) or "-"
