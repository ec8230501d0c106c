"""The time to a prompt's first token on a replica that has a part of the prompt's KV, in its HBM or in its DRAM.

A prompt of n tokens, of which a replica has m in HBM and the d after them in DRAM, takes

    min(F(n - m, m), L(d) + F(n - m - d, m + d))

seconds once its prefill begins: F is the prefill beside the replica's decoding batch (`steps`), L the time to load KV
from DRAM.
"""

from policies.cost.lines import Line
from policies.cost.service import ReplicaSpeed


def first_token_s(
    speed: ReplicaSpeed, load: Line, prompt: int, hbm: int, dram: int = 0, batch: int = 0, context: float = 0.0
) -> float:
    """Seconds from the beginning of the prompt's prefill to its first token; see the module.

    `load` is over tokens. The replica decodes `batch` requests with `context` tokens in total.
    """
    computed_s = speed.prefill_s(prompt - hbm, hbm, batch, context)
    if not dram:
        return computed_s
    loaded_s = load.seconds(dram) + speed.prefill_s(prompt - hbm - dram, hbm + dram, batch, context)
    return min(computed_s, loaded_s)
