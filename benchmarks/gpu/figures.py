"""The pictures of the page."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from benchmarks.evaluation.style import NEUTRAL, PALE, Pictures, drawing
from benchmarks.gpu.record import MovesRow, ServingRow, Spread, StageRow


def draw_moves(moves: Sequence[MovesRow], stages: Sequence[StageRow], pictures: Pictures, file: str) -> str:
    """The pause in gaps and the speed of copying, against the context: medians with ranges. Returns the markdown."""
    with drawing(2) as (figure, (pause, copying)):
        kinds = list(dict.fromkeys((row.transport, row.mode) for row in moves))
        for number, (transport, mode) in enumerate(kinds):
            rows = sorted((r for r in moves if (r.transport, r.mode) == (transport, mode)), key=lambda r: r.context)
            colour, label = NEUTRAL[number % len(NEUTRAL)], f"{mode}, {transport}"
            _curve(pause, [(r.context, r.figures["gaps"]) for r in rows if "gaps" in r.figures], colour, label)
            _curve(copying, [(r.context, r.figures["gb_s"]) for r in rows if "gb_s" in r.figures], colour, label)
        for row in stages:
            if row.stage == "move":
                copying.axhline(row.gb_s.median, color=PALE, linestyle="--")
                copying.annotate(f"slots alone, {row.slot_mib} MiB", (0.02, row.gb_s.median), fontsize=7,
                                 xycoords=("axes fraction", "data"), va="bottom")  # fmt: skip
        pause.set(title="Pause at the client", ylabel="median gaps of the stream", yscale="log")
        copying.set(title="Copying phase", ylabel="GB/s")
        if any(row.stage == "move" for row in stages):
            copying.set_yscale("log")
        else:
            copying.set_ylim(bottom=0)
        for axes in (pause, copying):
            axes.set(xlabel="tokens of context", xscale="log")
            contexts = sorted({row.context for row in moves})
            axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
            axes.minorticks_off()
        pause.legend()
        return pictures.save(figure, file, "Pause of a moved stream, and speed of its copying, against the context")


def _curve(axes: Axes, points: Sequence[tuple[int, Spread]], colour: str, label: str) -> None:
    if not points:
        return
    at = [context for context, _ in points]
    axes.plot(at, [spread.median for _, spread in points], marker="o", color=colour, label=label)
    ranges = [(c, s.low, s.high) for c, s in points if s.low is not None and s.high is not None]
    if ranges:
        axes.fill_between(
            [c for c, _, _ in ranges], [a for _, a, _ in ranges], [b for *_, b in ranges], color=colour, alpha=0.2
        )


def draw_serving(rows: Sequence[ServingRow], pictures: Pictures, file: str) -> str:
    """The ratios Mell / vLLM of throughput and of times, against the number of streams. Returns the markdown."""
    with drawing(1, width=6.0) as (figure, (axes,)):
        for number, figure_name in enumerate(("tokens_per_s", "ttft_p50", "itl_p50", "itl_p99")):
            points = [(row.streams, row.ratio) for row in rows if row.figure == figure_name]
            _curve(axes, sorted(points, key=lambda point: point[0]), NEUTRAL[number], figure_name)
        axes.axhline(1.0, color=PALE)
        axes.set(xlabel="streams", ylabel="Mell / vLLM's own server", xscale="log", title="Serving")
        axes.set_xticks(streams := sorted({row.streams for row in rows}), [str(number) for number in streams])
        axes.minorticks_off()
        axes.legend()
        return pictures.save(figure, file, "Throughput and times of Mell relative to vLLM's own server")
