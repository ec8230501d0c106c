"""The help of `mell serve` without vLLM's flags: vLLM's own parser shows those, and takes seconds to import."""

import argparse

DESCRIPTION = "Serve a model with Mell, by the flags of `vllm serve`."
USAGE = "mell serve MODEL [options] [-- MODEL [options]]..."
EPILOG = """vLLM's flags become Mell's configuration, which is shown and started; docs/vllm-flags.md lists them.
  --help=all shows every flag, --help=GROUP those of a group, --help=WORD those with the word."""


def add_own_options(parser: argparse.ArgumentParser) -> None:
    """Add Mell's own options to a parser."""
    own = parser.add_argument_group("Mell", "Mell's own options")
    own.add_argument("--min-replicas", type=int, metavar="N", help="minimum number of replicas (1)")
    own.add_argument(
        "--max-replicas", type=int, metavar="N", help="maximum number of replicas (--data-parallel-size, else 1)"
    )
    shown = own.add_mutually_exclusive_group()
    shown.add_argument("--dry-run", action="store_true", help="print the configuration, and start nothing")
    shown.add_argument("--write", metavar="FILE", help="write the configuration to FILE, and start nothing")


def short_help() -> str:
    """The text of `--help`: Mell's own options, and where vLLM's flags are."""
    parser = argparse.ArgumentParser(
        "mell serve",
        USAGE,
        DESCRIPTION,
        EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    parser.add_argument("MODEL", help="folder or hub name of the model")
    add_own_options(parser)
    return parser.format_help()
