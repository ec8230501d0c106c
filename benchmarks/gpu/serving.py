"""The step that compares serving by Mell with vLLM's own server."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.record import ServingRow, Spread
from benchmarks.load import Load
from benchmarks.serving import FIGURES, measure_pair, warm_up


@dataclass(frozen=True, slots=True)
class MeasureServing:
    """Offer loads of these numbers of streams to both servers, `pairs` times in alternating order."""

    streams: Sequence[int]
    prompt: int = 64
    output: int = 128
    pairs: int = 5
    weight: float = 1.0

    async def run(self, bench: Bench) -> None:
        """See `PartStep`."""
        ports, size = (bench.mell_port, bench.bare_port), (self.prompt, self.output)
        pairs: dict[int, list[tuple[Load, Load]]] = {streams: [] for streams in self.streams}
        try:
            for streams in self.streams:
                await warm_up(ports, streams, *size)
            for turn in bench.time.turns(self.pairs):
                for streams in self.streams:
                    pair = await measure_pair(ports, streams, *size, turn)
                    pairs[streams].append(pair)
                    bench.keep("serving", {"streams": streams, "pair": [dataclasses.asdict(load) for load in pair]})
        finally:
            for streams, measured in pairs.items():
                for figure, _, scale in FIGURES:
                    self._add(bench, streams, figure, scale, measured)

    def _add(self, bench: Bench, streams: int, figure: str, scale: float, pairs: Sequence[tuple[Load, Load]]) -> None:
        ours, theirs = ([getattr(pair[i], figure) * scale for pair in pairs] for i in range(2))
        spreads = Spread.of(ours), Spread.of(theirs), Spread.of(a / b for a, b in zip(ours, theirs, strict=True))
        mell, bare, ratio = spreads
        if mell is not None and bare is not None and ratio is not None:
            where = (bench.conditions, streams, self.prompt, self.output, figure)
            bench.record.add(ServingRow(*where, mell, bare, ratio))
