"""A process between an engine core and a frontend that does nothing but forward: ZMQ's own proxy, without Python.

python -m benchmarks.instruments.relay FROM TO
"""

import sys

import zmq


def main() -> None:
    """Forward messages from a socket bound to the first address to the one bound to the second, until a signal."""
    source, target = sys.argv[1:]
    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.bind(source)
    push.connect(target)
    zmq.proxy(pull, push)


if __name__ == "__main__":
    main()
