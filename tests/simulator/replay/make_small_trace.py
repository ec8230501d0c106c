"""Makes tests/data/small_trace.csv.gz: 40 synthetic requests within a minute, deterministically."""

import gzip
import random
from pathlib import Path

PATH = Path(__file__).parents[2] / "data" / "small_trace.csv.gz"


def rows() -> list[str]:
    """The lines of the trace: Poisson arrivals, log-normal lengths."""
    chance = random.Random(7)
    lines, at_s = ["arrival_s,prompt_tokens,output_tokens"], 0.0
    for _ in range(40):
        at_s += chance.expovariate(40 / 55)
        prompt, output = (round(chance.lognormvariate(mean, 0.8)) for mean in (6.5, 4.8))
        lines.append(f"{at_s:.3f},{prompt},{output}")
    return lines


if __name__ == "__main__":
    with PATH.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as packed:
        packed.write(("\n".join(rows()) + "\n").encode())
