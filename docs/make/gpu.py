"""Writes the measured part of docs/gpu.md from the records of runs on GPUs, which `python -m benchmarks.gpu` makes."""

from pathlib import Path

from benchmarks.evaluation.style import Pictures
from benchmarks.gpu.page import body, open_questions, title, wrapped
from benchmarks.gpu.record import RunRecord

PAGE = Path(__file__).parents[1] / "gpu.md"
RECORDS = Path(__file__).parents[1] / "gpu"
BEGIN, END = "<!-- records -->\n", "<!-- end of records -->\n"


def page(pictures: Path = RECORDS) -> str:
    """The page with the records of docs/gpu, the newest first; their pictures are written to `pictures`."""
    records = [RunRecord.read(path) for path in sorted(RECORDS.glob("*.jsonl"), reverse=True)]
    lines: list[str] = []
    for record in records:
        lines += [f"## {title(record)}", "", *body(record, Pictures(pictures, RECORDS.name), "###"), ""]
    lines += [
        "## Not run yet",
        "",
        *open_questions(records),
        "- `cuda_ipc` across two GPUs; several GPUs per replica; several nodes with GPUs; MPS; 8B with real weights.",
        "",
    ]
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + "\n" + "\n".join(wrapped(lines)) + "\n" + END + rest.split(END)[1]
