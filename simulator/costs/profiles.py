"""Reads measured profiles: the relevant columns, in seconds and bytes."""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from simulator.costs.fits import Timing
from simulator.errors import BadInput

MS, US, KIB = 1e-3, 1e-6, 1024

Row = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Profiles:
    """A folder of profiles. Every method raises `BadInput` if the profile is missing or cannot be read."""

    folder: Path

    def steps(self, model: str, gpu: str, tensor_parallel: int) -> tuple[list[Timing], bool]:
        """Step times by tokens per step; and True for whole steps, False for steps without attention over context."""
        if (path := self.folder / f"vidur_linear_{gpu}_{model}.csv").exists():
            columns = ("tensor_parallel", "num_tokens", "model_ms")
            rows = [row for row in _rows(path, columns) if int(row["tensor_parallel"]) == tensor_parallel]
            timings, whole = [Timing(float(r["num_tokens"]), float(r["model_ms"]) * MS) for r in rows], False
        else:
            timings, whole = list(self._whole_steps(model, gpu, tensor_parallel)), True
        if not timings:
            raise BadInput(
                f"There is no profile of {model} on {gpu} with tensor parallel {tensor_parallel} in {self.folder}, "
                f"only {', '.join(self._measured()) or 'nothing'}."
            )
        return timings, whole

    def transfers(self, link: str, within_node: bool) -> list[Timing]:
        """Transfer times by bytes, between two GPUs of one node or of two nodes."""
        if (path := self.folder / f"vidur_sendrecv_{link}.csv").exists():
            devices = 2 if within_node else 1
            rows = _rows(path, ("devices_per_node", "bytes", "median_ms"))
            timings = [
                Timing(float(r["bytes"]), float(r["median_ms"]) * MS)
                for r in rows
                if int(r["devices_per_node"]) == devices
            ]
        elif (path := self.folder / f"apex_sendrecv_{link}.csv").exists():
            rows = _rows(path, ("num_nodes", "size(kb)", "time(us)"))
            nodes = 1 if within_node else 2
            timings = [
                Timing(float(r["size(kb)"]) * KIB, float(r["time(us)"]) * US)
                for r in rows
                if int(r["num_nodes"]) == nodes
            ]
        else:
            names = ", ".join(sorted(path.stem.split("_sendrecv_")[1] for path in self.folder.glob("*_sendrecv_*.csv")))
            raise BadInput(f"There is no profile of a link {link} in {self.folder}, only {names or 'nothing'}.")
        if not timings:
            raise BadInput(f"{path} has no transfers {'within a node' if within_node else 'between nodes'}.")
        return timings

    def _whole_steps(self, model: str, gpu: str, tensor_parallel: int) -> Iterator[Timing]:
        """Step times of decodes, with one token per request, and of prefills of a single request."""
        path = self.folder / "splitwise_perf.csv"
        if not path.exists():
            return
        wanted = (model, gpu, str(tensor_parallel))
        columns = ("model", "hardware", "tensor_parallel", "prompt_size", "batch_size", "prompt_ms", "token_ms")
        for row in _rows(path, columns):
            if (row["model"], row["hardware"].removesuffix("-80gb"), row["tensor_parallel"]) == wanted:
                yield Timing(float(row["batch_size"]), float(row["token_ms"]) * MS)
                if row["batch_size"] == "1":
                    yield Timing(float(row["prompt_size"]), float(row["prompt_ms"]) * MS)

    def _measured(self) -> list[str]:
        linear = (path.stem.removeprefix("vidur_linear_") for path in self.folder.glob("vidur_linear_*.csv"))
        return sorted(" of ".join(name.split("_", 1)) for name in linear)


def _rows(path: Path, columns: tuple[str, ...]) -> list[Row]:
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            reader = csv.DictReader(lines)
            missing = [column for column in columns if column not in (reader.fieldnames or ())]
            if missing:
                raise BadInput(f"{path} has no column {', '.join(missing)}.")
            return list(reader)
    except OSError as error:
        raise BadInput(f"Cannot read {path}: {error.strerror}.") from None
