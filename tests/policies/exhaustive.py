"""The fewest bins, by trying every packing. Exponential: for a dozen sizes, as a check on bounds and policies."""

from collections.abc import Sequence


def optimum(sizes: Sequence[int], capacity: int) -> int:
    """The least number of bins of that capacity that hold all sizes; each size is at most the capacity.

    Branch and bound: the largest size goes into each bin that differs, or into a new one. A branch ends when its bins
    and those that the remaining total still takes are no fewer than the best packing so far.
    """
    remaining = sorted(sizes)

    def fewest(rooms: list[int], best: int) -> int:
        lacking = sum(remaining) - sum(rooms)
        if len(rooms) + max(0, -(-lacking // capacity)) >= best:
            return best
        if not remaining:
            return len(rooms)
        size = remaining.pop()
        for room in sorted({room for room in rooms if room >= size}):
            others = rooms.copy()
            others.remove(room)
            best = fewest([*others, room - size], best)
        best = fewest([*rooms, capacity - size], best)
        remaining.append(size)
        return best

    return fewest([], len(sizes) + 1)
