"""The heap of a serving process, exempt from garbage collection."""

import gc


def freeze_heap() -> None:
    """Exempt all present objects from garbage collection. To be called once the process is ready to serve.

    Modules and their contents are some hundred thousand objects. A full collection would visit all of them, and stall
    all streams through this process meanwhile.
    """
    gc.collect()
    gc.freeze()
