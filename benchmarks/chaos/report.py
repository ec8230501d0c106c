"""What is told of a run: a JSON document, and a table; pure."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from benchmarks.chaos.hand import NOTHING, Blow
from benchmarks.chaos.heard import GOOD, Verdict
from benchmarks.chaos.run import Judged, Result
from benchmarks.chaos.strikes import Kind


def is_good(result: Result) -> bool:
    """Whether every stream ended as promised, and nothing was left behind."""
    return not result.leaks and all(judged.verdict in GOOD for judged in result.judged)


def make_document(result: Result, options: dict[str, Any]) -> dict[str, Any]:
    """Everything but the texts of good answers."""
    return {
        "options": options,
        "good": is_good(result),
        "streams": dict(Counter(judged.verdict for judged in result.judged)),
        "faults": {kind: _tell(kind, result) for kind in Kind},
        "leaks": result.leaks,
        "bad": [_tell_bad(judged) for judged in result.judged if judged.verdict not in GOOD],
        "strikes": [_tell_blow(blow) for blow in result.blows],
    }


def _tell(kind: Kind, result: Result) -> dict[str, Any]:
    """One kind of fault: how often it was drawn and carried out, what came of it, how the streams went that it hit.

    A stream that several faults hit counts for each of them.
    """
    blows = [blow for blow in result.blows if blow.strike.kind is kind]
    hit = {label for blow in blows if blow.outcome != NOTHING for label in blow.hit}
    return {
        "drawn": len(blows),
        "struck": sum(blow.outcome != NOTHING for blow in blows),
        "outcomes": dict(Counter(blow.outcome for blow in blows)),
        "streams": dict(Counter(judged.verdict for judged in result.judged if judged.offer.label in hit)),
    }


def _tell_bad(judged: Judged) -> dict[str, Any]:
    offer, heard = asdict(judged.offer), asdict(judged.heard)
    return {"verdict": judged.verdict, "what": judged.what, "offer": offer, "heard": heard}


def _tell_blow(blow: Blow) -> dict[str, Any]:
    told = asdict(blow)
    return {**told.pop("strike"), **told}


def render(document: dict[str, Any]) -> str:
    """The document as a page of text."""
    return "\n".join(_lines(document))


def _lines(document: dict[str, Any]) -> Iterator[str]:
    yield f"{'':12}{'drawn':>7}{'struck':>8}   streams hit: " + ", ".join(Verdict)
    for kind, told in document["faults"].items():
        yield f"{kind:12}{told['drawn']:7}{told['struck']:8}   {_counts(told['streams'])}"
        yield from (f"{'':30}{count} x {outcome}" for outcome, count in sorted(told["outcomes"].items()))
    yield f"{'all streams':30}{_counts(document['streams'])}"
    for bad in document["bad"]:
        yield f"BAD: {bad['offer']['label']}: {bad['verdict']}: {bad['what']}"
    yield from (f"LEAK: {leak}" for leak in document["leaks"])
    yield "every stream ended as promised, nothing is left" if document["good"] else "NOT as promised"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if verdict in counts) or "-"
