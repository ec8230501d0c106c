"""Makes examples/chat_trace.csv: 480 synthetic requests in eight minutes, deterministically."""

import math
import random
from pathlib import Path

PATH = Path(__file__).parents[3] / "examples" / "chat_trace.csv"
_MOST_PER_S, _MINUTES = 1.8, 8


def lines() -> list[str]:
    """The lines of the trace.

    Arrivals are a Poisson process whose rate rises from 0.2 to 1.8 per second and falls again. Lengths are log-normal,
    with medians of 400 and 150 tokens.
    """
    chance = random.Random(5)
    rows, at_s = ["arrival_s,prompt_tokens,output_tokens"], 0.0
    while (at_s := at_s + chance.expovariate(_MOST_PER_S)) < 60 * _MINUTES:
        rate = 0.2 + 1.6 * math.sin(math.pi * at_s / (60 * _MINUTES)) ** 2
        if chance.random() < rate / _MOST_PER_S:
            prompt, output = (round(chance.lognormvariate(math.log(median), 0.8)) for median in (400, 150))
            rows.append(f"{at_s:.3f},{max(1, prompt)},{max(1, output)}")
    return rows


if __name__ == "__main__":
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text("\n".join(lines()) + "\n")
