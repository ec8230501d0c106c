"""One request of a workload."""

from dataclasses import dataclass

from policies.model import RequestId, Tokens


@dataclass(frozen=True, slots=True)
class Job:
    """It arrives at `arrival_s` seconds with `prompt` tokens and produces `output` more, which nobody knows before."""

    id: RequestId
    arrival_s: float
    prompt: Tokens
    output: Tokens
