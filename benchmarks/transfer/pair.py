"""The driver's handle of source and target, and the timings of their stages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import ray
from tqdm import tqdm

from benchmarks.transfer.end import LIMIT_S, SOURCE, TARGET, TransferEnd
from benchmarks.transfer.ports import BLOCK_BYTES, ProcessSpan, pieces
from deployments.config import MAPPED
from migration.protocol.sizing import MIB

PIPELINE = "pipeline"


@dataclass(frozen=True, slots=True)
class StageTiming:
    """One measurement of a stage: its seconds, and the CPU seconds of the participating actors meanwhile."""

    took_s: float
    cpu_s: float

    @classmethod
    def of(cls, spans: Sequence[ProcessSpan]) -> Self:
        """The timing from the first beginning to the last end of the actors' spans."""
        took_s = max(span.ended.at for span in spans) - min(span.began.at for span in spans)
        return cls(took_s, sum(span.ended.cpu - span.began.cpu for span in spans))


class EndPair:
    """The driver's handle of source and target; on GPUs, both share `gpus`."""

    def __init__(self, transport: str, size: int, device: str = "cpu", slot_mib: int = 8, gpus: int = 1) -> None:
        share = {"num_gpus": min(1.0, gpus / 2)} if device == "cuda" else {}
        actor = ray.remote(num_cpus=1, **share)(TransferEnd)
        self._source, self._target = (
            actor.remote(name, transport, size, device, slot_mib) for name in (SOURCE, TARGET)
        )
        self._slot_bytes = slot_mib * MIB
        self._has_send = transport not in MAPPED
        _get(self._source.connect.remote(_get(self._target.port.remote())))

    def measure(self, size: int, repeat: int) -> dict[str, list[StageTiming]]:
        """Measure every stage `repeat` times, in turns, after a warm-up turn that checks the arrived blocks.

        Raises:
            RuntimeError: the target's blocks are not the source's.
        """
        source, target, blocks = self._source, self._target, size // BLOCK_BYTES
        stages: dict[str, Callable[[], Sequence[ProcessSpan]]] = {
            "memcpy": lambda: [_get(source.memcpy.remote(size))],
            "tcp": lambda: _both(source.tcp_send.remote(size), target.tcp_receive.remote(size)),
            "gather": lambda: [_get(source.gather.remote(blocks))],
            "send": lambda: self._send(blocks),
            "scatter": lambda: [self._scatter(blocks)],
            PIPELINE: lambda: self._move(blocks),
        }
        if not self._has_send:
            del stages["send"]
        _both(source.fill.remote(size), target.fill.remote(None))
        runs: dict[str, list[StageTiming]] = {stage: [] for stage in stages}
        for i in tqdm(range(repeat + 1), desc=f"{size // MIB} MiB", unit="turn"):
            for stage, run in stages.items():
                spans = run()
                if i:
                    runs[stage].append(StageTiming.of(spans))
            if i == 0 and len(set(_both(source.digest.remote(blocks), target.digest.remote(blocks)))) > 1:
                raise RuntimeError("the target's blocks are not the source's")
        return runs

    def close(self) -> None:
        """End both actors."""
        for end in (self._source, self._target):
            ray.kill(end)

    def _send(self, blocks: int) -> list[ProcessSpan]:
        source, target = self._source, self._target
        channels = _get(source.channels.remote(1 + len(list(pieces(blocks, self._slot_bytes)))))
        return _both(source.send_alone.remote(channels, blocks), target.receive_alone.remote(channels, blocks))

    def _scatter(self, blocks: int) -> ProcessSpan:
        """Scatter from the source's slots if they are shared, else from the target's own, as in a migration."""
        holder = self._target if self._has_send else self._source
        span: ProcessSpan = _get(self._target.scatter.remote(_get(holder.hold.remote(blocks)), blocks))
        _get(holder.release.remote())
        return span

    def _move(self, blocks: int) -> list[ProcessSpan]:
        return [_get(self._source.move.remote(self._target, blocks)), _get(self._target.received.remote())]


def _get(ref: Any) -> Any:
    return ray.get(ref, timeout=LIMIT_S)


def _both(at_source: Any, at_target: Any) -> list[Any]:
    return list(ray.get([at_source, at_target], timeout=LIMIT_S))
