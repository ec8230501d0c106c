"""The heap of a process that serves, kept out of the garbage collector's way."""

import gc


def freeze_heap() -> None:
    """Take all that the process has made so far to be there for good: no garbage collection looks at it again.

    Modules and what they hold are some hundred thousand objects. A full collection walks through all of them, and
    meanwhile no stream that passes through the process goes on. To be called once the process is ready to serve.
    """
    gc.collect()
    gc.freeze()
