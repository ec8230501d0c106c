"""One row of every type, as a run on a GPU makes them."""

from benchmarks.gpu.record import (
    EqualityRow,
    FailureRow,
    FaultRow,
    MemoryRow,
    MovesRow,
    NcclRow,
    NeighbourRow,
    NoteRow,
    OriginRow,
    PartRow,
    ReplacementRow,
    Row,
    ServingRow,
    Spread,
    StageRow,
    StartRow,
    SuiteRow,
)

ON = "8b model, CUDA graphs; cuda_ipc"
ORIGIN = OriginRow("2027-01-02", "abc1234", "cuda", ["H100, 80 GiB, driver 1"], "Python 3.12")
MOVES = MovesRow(
    ON,
    "cuda_ipc",
    "pre-copy",
    24576,
    5,
    {"gaps": Spread(4, 3.25, 2.5, 4.125), "client_ms": Spread(4, 27.1), "gb_s": Spread(4, 51.5, 50, 60)},
    ["committed by tokens: None"],
)
SERVING = ServingRow(ON, 64, 32, 128, "tokens_per_s", Spread(2, 1234, 1, 2), Spread(2, 2000, 1, 2), Spread(2, 0.6))
EQUAL = EqualityRow(ON, "greedy", "Mell, cuda_ipc", "cached", "moved by kv", 16, 15, 14)
ROWS: tuple[Row, ...] = (
    ORIGIN,
    NoteRow("title", "one H100"),
    NoteRow("Pause and copying", "A remark."),
    StartRow("Mell, 2 replica(s)", ON, 101.5),
    SuiteRow("pytest tests/gpu", "31 passed, 7 skipped", ["two GPUs"], True),
    StageRow("copy", 0, Spread(1, 1433)),
    StageRow("move", 64, Spread(20, 107, 100, 110)),
    NcclRow("single rank", "made in 0.7 s"),
    MOVES,
    NeighbourRow(
        ON, "cuda_ipc", "tokens", "target", 8192, 4, Spread(3, 1.25), Spread(3, 22.5), Spread(3, 6.5), Spread(3, 8.5)
    ),
    SERVING,
    EQUAL,
    FaultRow(ON, "kill", 16, 9, ["after 3 chunks"], 0.055, 0.5, {"committed by kv": 4}),
    ReplacementRow(ON, "kill", 77.5),
    MemoryRow(ON, "replica 0", "GPU memory", 745.0, 256.0),
    FailureRow("moves", "MeasureNeighbours", "RuntimeError: no"),
    PartRow("moves", "cut", 388.5),
)
