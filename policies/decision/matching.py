"""Prompts looked up in the replicas' caches: the placements that they would get, with the reasons."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from policies.decision.placement import Place, Queue
from policies.model import ReplicaId, Tokens
from policies.prefix.copies import Fetch
from policies.prefix.routing import ReplicaScore


class Basis(StrEnum):
    """The reason for the replica of a placement."""

    CONTENT = "content"
    """The policy chose among the replicas near the best score."""
    SESSION = "session"
    """The replica is that of the session's newest request."""
    POLICY = "policy"
    """The policy chose among all replicas."""


class Routed(NamedTuple):
    """A placement, its basis, and the replicas that the prompt's content or session favours."""

    placing: Place | Queue
    basis: Basis = Basis.POLICY
    favoured: Collection[ReplicaId] = ()


@dataclass(frozen=True, slots=True)
class MatchedReplica:
    """A running replica's part in a match: its score; `fits` if it accepts the prompt and has room for it; `favoured`
    as in `Routed`.
    """

    score: ReplicaScore
    fits: bool
    favoured: bool

    def to_json(self) -> dict[str, Any]:
        """The replica as a member of `PromptMatch.to_json`."""
        score = self.score
        return {
            "id": score.replica,
            "tokens": {"hbm": score.hbm, "dram": score.dram},
            "fits": self.fits,
            "favoured": self.favoured,
            "wait_s": score.wait_s,
            "copy": None if (fetch := score.fetch) is None else _copy_json(fetch),
            "prefill_s": score.prefill_s,
            "first_token_s": score.first_token_s,
            "score_s": score.score_s,
        }


def _copy_json(fetch: Fetch) -> dict[str, Any]:
    return {"from": fetch.donor, "tokens": fetch.tokens, "copy_s": fetch.copy_s}


@dataclass(frozen=True, slots=True)
class PromptMatch:
    """A prompt of `tokens` tokens, and the placement that it would get (None: no replica runs).

    `block_tokens` is the size of the engines' blocks, 0 before it is known.
    """

    tokens: Tokens
    block_tokens: int
    routed: Routed | None
    replicas: tuple[MatchedReplica, ...]

    @property
    def full_blocks(self) -> int:
        """The number of the prompt's full blocks."""
        return self.tokens // self.block_tokens if self.block_tokens else 0

    def to_json(self) -> dict[str, Any]:
        """The match as the answer of `/mell/cache/match`, without the state of the routing."""
        routed = self.routed
        return {
            "prompt_tokens": self.tokens,
            "full_blocks": self.full_blocks,
            "block_size": self.block_tokens,
            "replica": None if routed is None else routed.placing.replica,
            "queues": routed is not None and isinstance(routed.placing, Queue),
            "by": None if routed is None else str(routed.basis),
            "replicas": [replica.to_json() for replica in self.replicas],
        }
