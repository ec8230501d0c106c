"""The workloads: a trace with models, and the file of its models. Equal seeds give equal ones.

The models are of Llama 3 8B's size, each on an H100 of 80 GB. Step times and KV bytes are those of the shipped costs
`h100-8b-nvlink`, which name their sources. The other constants, with theirs:

    parameters    8.03e9 at 16 bits, by the model's shape: 15,317 MiB
    budget        0.92 of the 81,559 MiB that the driver shows for such a GPU: vLLM's default share
    fixed         2,048 MiB for context, graphs and activations: an assumption
    asleep        512 MiB for the context of a sleeping engine, its graphs dropped: an assumption
    wake          0.3 s, and the parameters from host memory at 25e9 bytes/s, half of the rate of PCIe 5.0 x16: an
                  assumption. Measured on a CPU: 0.4 to 0.5 s for a model of 276 MiB from the page cache
    sleep         0.1 s: parameters have a copy in host memory and are only dropped: an assumption
    start         30 s, by the costs: an assumption
    longest       8,192 tokens, Llama 3's context
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import cos, pi
from pathlib import Path
from random import Random

import yaml

PARAMETERS_MIB = 15317
WAKE_S = round(0.3 + PARAMETERS_MIB * (1 << 20) / 25e9, 2)
LONGEST = 8192
BUDGET_MIB = 75034
SLEEP_S = 0.1
MODEL = {
    "costs": "h100-8b-nvlink",
    "parameters_mib": PARAMETERS_MIB,
    "fixed_mib": 2048,
    "asleep_mib": 512,
    "max_model_len": LONGEST,
    "wake_s": WAKE_S,
}


@dataclass(frozen=True, slots=True)
class SharingWorkload:
    """Models with independent Poisson arrivals at `rates`, in requests per second, for `horizon_s` seconds.

    Prompts and outputs are exponential with these means, in tokens, and cut to the longest request. With `day_s`, the
    rates rise and fall once in that many seconds, to twice the mean and to none, those of each model at another time.
    """

    name: str
    rates: Sequence[float]
    prompt: float
    output: float
    horizon_s: float
    day_s: float | None = None
    budget_mib: int = BUDGET_MIB
    longest: int = LONGEST

    def rows(self, seed: int = 0) -> list[tuple[float, int, int, str]]:
        """Arrival in seconds, prompt and output tokens, and model of each request, in the order of arrival."""
        return sorted(row for number, rate in enumerate(self.rates) for row in self._of_model(number, rate, seed))

    def write(self, folder: Path, seed: int = 0) -> tuple[Path, Path]:
        """Write the trace and the file of models; their paths."""
        trace, models = folder / f"{self.name}.csv", folder / f"{self.name}.yaml"
        lines = (f"{at_s:.3f},{prompt},{output},{model}\n" for at_s, prompt, output, model in self.rows(seed))
        trace.write_text("arrival_s,prompt_tokens,output_tokens,model\n" + "".join(lines))
        entries = [{"name": model_name(number), **MODEL} for number in range(len(self.rates))]
        models.write_text(
            yaml.safe_dump({"budget_mib": self.budget_mib, "sleep_s": SLEEP_S, "models": entries}, sort_keys=False)
        )
        return trace, models

    def _of_model(self, number: int, rate: float, seed: int) -> Iterator[tuple[float, int, int, str]]:
        chance, at_s = Random(f"{seed}-{self.name}-{number}"), 0.0
        highest = 1.0 if self.day_s is None else 2.0
        while (at_s := at_s + chance.expovariate(highest * rate)) < self.horizon_s:
            if self.day_s is not None and chance.random() * highest > self._share(number, at_s / self.day_s):
                continue
            prompt = min(self.longest // 2, 1 + int(chance.expovariate(1 / self.prompt)))
            output = min(self.longest - prompt, 2 + int(chance.expovariate(1 / self.output)))
            yield at_s, prompt, output, model_name(number)

    def _share(self, number: int, days: float) -> float:
        """The rate of a model at that time, as a multiple of its mean rate."""
        return 1.0 - cos(2 * pi * (days + number / len(self.rates)))


def zipf(total_rate: float, models: int = 40, exponent: float = 1.0) -> list[float]:
    """Rates of models by Zipf's law, the most popular one first."""
    shares = [(rank + 1) ** -exponent for rank in range(models)]
    return [total_rate * share / sum(shares) for share in shares]


WORKLOADS = (
    SharingWorkload("zipf-40-busy", zipf(8.0), 500, 250, 1200.0),
    SharingWorkload("zipf-40", zipf(2.0), 500, 250, 1200.0),
    # Aegaeon (SOSP 2025): 0.037 requests per second and model, 16.8 s of service; 1,900 tokens take 16.7 s alone here.
    SharingWorkload("aegaeon-100", [0.037] * 100, 500, 1900, 1200.0),
)

DAY = SharingWorkload("day-2", [1.0, 1.0], 1500, 700, 1200.0, day_s=1200.0, budget_mib=48_000)
"""Two models, one busy while the other rests, a day in 20 minutes, on less memory: it has to follow demand."""


def model_name(number: int) -> str:
    """The name of a model in traces."""
    return f"model-{number:02d}"
