"""The paper's claims one by one: our figures beside each, and the verdict by the rules of MELL's claims."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.evaluation.sections.claims import Finding, holds_on, up_to, within
from benchmarks.evaluation.words import share
from benchmarks.memserve.case import RATES, SCHEDULED, SHARED_RATE, SHARES, STEPS, TRIPLE, PaperCase
from benchmarks.memserve.results import Figures
from policies.model import ReplicaId
from policies.prefix.change import CacheChange, Tier
from policies.prefix.routing import Routing
from policies.prefix.tree import PromptTree

_BY_NAME = {setting.name: setting for setting in TRIPLE}
_PROMPT = 256
"""Blocks of a prompt of 4,096 tokens."""


@dataclass(frozen=True, slots=True)
class PaperClaim:
    """A statement of the paper, and its measurement; most are in sections 8.3 and 8.4."""

    text: str
    find: Callable[[Figures], Finding]


def case(setting: str, workload: str, rate: float) -> PaperCase:
    """A case of three instances, by the paper's name of its setting."""
    return PaperCase(_BY_NAME[setting], workload, rate)


def better(found: Figures, one: PaperCase, other: PaperCase, figure: str) -> float:
    """The share by which a figure is lower in one case than in another."""
    return 1.0 - float(getattr(found[one], figure)) / float(getattr(found[other], figure))


@dataclass(frozen=True, slots=True)
class Promised:
    """A figure of `PaperFigures`, its name in the page, and the share by which the paper has it fall."""

    figure: str
    name: str
    share: float


def falls(
    workload: str, pairs: Sequence[tuple[str, str]], promised: Sequence[Promised]
) -> Callable[[Figures], Finding]:
    """Figures fall from the second to the first setting of a pair: at the rate and with the pair that are best for the
    claim, the figure that falls least beside its promise decides.
    """

    def find(found: Figures) -> Finding:
        falls_by = {
            f"{one} at {rate:g}/s": [
                better(found, case(one, workload, rate), case(other, workload, rate), each.figure) for each in promised
            ]
            for rate in RATES[workload]
            for one, other in pairs
        }
        best = max(falls_by, key=lambda each: _least(falls_by[each], promised))
        text = ", ".join(f"{each.name} {share(fall)}" for each, fall in zip(promised, falls_by[best], strict=True))
        return Finding(f"at best {text} ({best})", up_to(_least(falls_by[best], promised), 1.0))

    return find


def _least(falls_by: Sequence[float], promised: Sequence[Promised]) -> float:
    """The least part of its promise that a figure keeps."""
    return min(fall / each.share for each, fall in zip(promised, falls_by, strict=True))


def split_decides(found: Figures) -> Finding:
    """1P2D has the lower time per output token, and 2P1D the lower time to the first token."""
    held, texts = [], []
    for rate in RATES["sharegpt_like"]:
        one, two = (found[case(name, "sharegpt_like", rate)] for name in ("1P2D", "2P1D"))
        held.append(one.tpot < two.tpot and one.ttft > two.ttft)
        texts.append(f"{one.tpot / two.tpot:.2f} and {one.ttft / two.ttft:.2f}")
    return Finding(f"1P2D to 2P1D, TPOT and TTFT: {'; '.join(texts)}", holds_on(held))


def best_of_all(found: Figures) -> Finding:
    """Disaggregation with caching has the lowest job completion time of all settings."""
    ratios = []
    for rate in RATES["sharegpt_like"]:
        jct = {setting.name: found[PaperCase(setting, "sharegpt_like", rate)].jct for setting in TRIPLE}
        apart = min(jct["1P2D-CC"], jct["2P1D-CC"])
        ratios.append(apart / min(jct["PD"], jct["PD-CC"], jct["1P2D"], jct["2P1D"]))
    text = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    return Finding(f"{text} of the best other setting's", holds_on([ratio < 1 for ratio in ratios]))


def returns_pay(found: Figures) -> Finding:
    """With returns, the prefill instance finds more of the prompts, and first tokens come sooner."""
    held, texts = [], []
    for rate in RATES["sharegpt_like"]:
        without, returned = (found[PaperCase(setting, "sharegpt_like", rate)] for setting in STEPS[1:])
        held.append(returned.hits > without.hits and returned.ttft < without.ttft)
        texts.append(f"{share(without.hits, 0)} to {share(returned.hits, 0)}, TTFT {returned.ttft / without.ttft:.2f}")
    return Finding(f"found: {'; '.join(texts)}", holds_on(held))


def scheduled(share_ratio: int, routing: Routing) -> PaperCase:
    """A case of the study of the scheduler."""
    return PaperCase(SCHEDULED, "loogle_like", SHARED_RATE, routing=routing, share=share_ratio)


def tree_beats_session(found: Figures) -> Finding:
    """Scheduling by the prompt tree has a 59 % lower P99 of the first token than by session."""
    falls_by = {
        ratio: better(found, scheduled(ratio, Routing.TREE), scheduled(ratio, Routing.SESSION), "ttft_p99")
        for ratio in SHARES
    }
    text = ", ".join(f"{share(fall)} (share ratio {ratio})" for ratio, fall in falls_by.items())
    return Finding(text, up_to(max(falls_by.values()), 0.59))


def index_is_fast(found: Figures) -> Finding:
    """At most 0.7 ms for the insertion of a prompt of 4,096 tokens: processor time, 200 insertions and matches."""
    insert_s, match_s = index_times(200)
    return Finding(f"insertion {insert_s * 1e3:.3f} ms, match {match_s * 1e3:.3f} ms", within(insert_s, 0.7e-3))


def index_times(count: int) -> tuple[float, float]:
    """Mean seconds of processor time of the insertion and of the match of a prompt in the scheduler's tree."""
    tree, replica = PromptTree(promise_s=600.0), ReplicaId("r")
    tree.apply(replica, CacheChange({}, {}, whole=True))
    chance = random.Random(0)
    prompts = [tuple(chance.getrandbits(64) for _ in range(_PROMPT)) for _ in range(count)]
    began = time.process_time()
    for names in prompts:
        tree.apply(replica, CacheChange({Tier.HBM: names}, {}, whole=False))
    inserted = time.process_time()
    for names in prompts:
        tree.match(names)
    return (inserted - began) / count, (time.process_time() - inserted) / count


_APART = (("1P2D", "PD"), ("2P1D", "PD"))
_CACHED = (("1P2D-CC", "1P2D"), ("2P1D-CC", "2P1D"))


def _of_jct(mean: float, p99: float) -> Sequence[Promised]:
    return Promised("jct", "JCT", mean), Promised("jct_p99", "its P99", p99)


def _of_ttft(mean: float, p99: float) -> Sequence[Promised]:
    return Promised("ttft", "TTFT", mean), Promised("ttft_p99", "its P99", p99)


CLAIMS: Sequence[PaperClaim] = (
    PaperClaim(
        "ShareGPT: disaggregation (1P2D) takes 30 % of the JCT, 42 % of its P99",
        falls("sharegpt_like", [("1P2D", "PD")], _of_jct(0.30, 0.42)),
    ),
    PaperClaim(
        "ShareGPT: caching takes 17 % of 1P2D's JCT, 29 % of its P99",
        falls("sharegpt_like", [("1P2D-CC", "1P2D")], _of_jct(0.17, 0.29)),
    ),
    PaperClaim(
        "ShareGPT: caching takes 58 % of 1P2D's TTFT, 45 % of its P99",
        falls("sharegpt_like", [("1P2D-CC", "1P2D")], _of_ttft(0.58, 0.45)),
    ),
    PaperClaim("ShareGPT: 1P2D has a lower TPOT than 2P1D, and a higher TTFT", split_decides),
    PaperClaim("ShareGPT: disaggregation with caching outperforms all others", best_of_all),
    PaperClaim(
        "LooGLE: disaggregation takes 10.3 % of the JCT, 10.8 % of its P99",
        falls("loogle_like", _APART, _of_jct(0.103, 0.108)),
    ),
    PaperClaim(
        "LooGLE: caching takes 26.9 % of its JCT, 22.5 % of its P99",
        falls("loogle_like", _CACHED, _of_jct(0.269, 0.225)),
    ),
    PaperClaim(
        "LooGLE: caching takes 56.2 % of its TTFT, 45.2 % of its P99",
        falls("loogle_like", _CACHED, _of_ttft(0.562, 0.452)),
    ),
    PaperClaim(
        "ReAct: disaggregation takes 40.8 % of the JCT, 53.1 % of its P99",
        falls("react_like", _APART, _of_jct(0.408, 0.531)),
    ),
    PaperClaim(
        "ReAct: caching takes 26.7 % of its JCT, 21.4 % of its P99",
        falls("react_like", _CACHED, _of_jct(0.267, 0.214)),
    ),
    PaperClaim(
        "ReAct: caching takes 78.5 % of its TTFT, 84.9 % of its P99",
        falls("react_like", _CACHED, _of_ttft(0.785, 0.849)),
    ),
    PaperClaim("ShareGPT: PD-Caching-3 adds the answers to what PD-Caching-2 finds (section 5.1)", returns_pay),
    PaperClaim("LooGLE, 3P1D: the prompt tree takes 59 % of the P99 TTFT by session", tree_beats_session),
    PaperClaim("the insertion of a prompt of 4,096 tokens takes at most 0.7 ms", index_is_fast),
)


def cases() -> list[PaperCase]:
    """The cases that the claims compare."""
    grid = [PaperCase(s, workload, rate) for workload, rates in RATES.items() for rate in rates for s in TRIPLE]
    steps = [PaperCase(setting, "sharegpt_like", rate) for setting in STEPS for rate in RATES["sharegpt_like"]]
    return [
        *grid,
        *steps,
        *(scheduled(ratio, routing) for ratio in SHARES for routing in (Routing.TREE, Routing.SESSION)),
    ]


def verdicts(found: Figures) -> Iterator[tuple[PaperClaim, Finding]]:
    """Every claim with its finding."""
    return ((claim, claim.find(found)) for claim in CLAIMS)
