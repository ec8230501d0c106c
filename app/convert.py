"""`mell convert`: Mell's configuration, from the command line of `vllm serve` or from Ray Serve LLM's configuration.

    mell convert [--output FILE] [--device cuda|cpu] INPUT
    mell convert [--output FILE] [--device cuda|cpu] -- vllm serve MODEL [FLAGS]

INPUT is a configuration of Serve with `ray.serve.llm:build_openai_app`, or Kubernetes manifests with a RayService. Only
flags need vLLM, whose parser reads them.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from app.configuration.conversion import Conversion, NotConverted, checked_settings, convert_documents
from app.configuration.documents import DocumentError, read_documents
from app.installation import INSTALL
from app.settings import has_gpu_build
from app.vllm_cli.__main__ import api_keys, flags_in_file, locate, variables
from app.vllm_cli.document import comments_of, render_config, whole_of
from app.vllm_cli.flags import removed_flags
from app.vllm_cli.translation import Flags, FlagsRefused, Host, Translation, translate


def main(arguments: Sequence[str]) -> None:
    """Write the configuration. Exits with status 1 if it lacks anything that had to be left out, or there is none."""
    command = list(pairwise(arguments))
    place = command.index(("vllm", "serve")) if ("vllm", "serve") in command else None
    parser = _parser(has_input=place is None)
    given = parser.parse_args([word for word in arguments[:place] if place is None or word != "--"])
    has_gpus = has_gpu_build() if given.device is None else given.device == "cuda"
    if place is None:
        made = _from_file(Path(given.input), has_gpus)
        source = Path(given.input).name
    else:
        made = _from_flags(arguments[place + 2 :], has_gpus)
        source = "the flags of `vllm serve`"
    text = render_config(_head(made, source), made.whole, made.application, made.comments)
    if given.output is None:
        print(text, end="")
    else:
        try:
            with open(given.output, "x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            _fail([f"{given.output} exists: remove it, or write another file"])
        except OSError as error:
            _fail([f"{given.output} cannot be written: {error.strerror}"])
    _say([*made.notes, *(f"not carried over: {line}" for line in made.left_out)])
    if made.left_out:
        sys.exit(1)


def _parser(has_input: bool) -> argparse.ArgumentParser:
    """The parser of the command's own options."""
    parser = argparse.ArgumentParser(
        "mell convert",
        "mell convert [--output FILE] [--device cuda|cpu] (INPUT | -- vllm serve MODEL [FLAGS])",
        "Write Mell's configuration, from Ray Serve LLM's or from the command line of vllm serve.",
        "What cannot be carried over is named, and the exit status is 1.",
    )
    if has_input:
        parser.add_argument("input", metavar="INPUT", help="configuration of Serve, or manifests with a RayService")
    parser.add_argument("--output", metavar="FILE", help="a new file; by default, standard output")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="of the replicas; by default, of the installed vLLM")
    return parser


def _from_file(file: Path, has_gpus: bool) -> Conversion:
    try:
        documents = read_documents(file)
        return convert_documents(documents, has_gpus, lambda path: (file.parent / path).read_text("utf-8"))
    except DocumentError as error:
        _fail([f"{file}: {error}"])
    except NotConverted as error:
        _fail(f"{file}: {line}" for line in error.lines)


def _from_flags(arguments: Sequence[str], has_gpus: bool) -> Conversion:
    """The configuration that `mell serve` makes, without the flags that it refuses."""
    if lines := removed_flags([*arguments, *flags_in_file(arguments)]):
        _fail(lines)
    try:
        from app.vllm_cli.command_line import parse  # imports vLLM, in seconds
    except ModuleNotFoundError as error:
        _fail([f"{error.name} is not installed, and vLLM's own parser reads the flags: run {INSTALL}"])
    try:
        flags, own = parse(arguments)
        translation, left_out = _translated(flags, Host(has_gpus, locate), own.min_replicas, own.max_replicas)
        _, absent = checked_settings(translation.args, left_out)
        keys = variables(api_keys(translation, os.environ))
    except (FlagsRefused, NotConverted) as error:
        _fail(error.lines)
    except (ValueError, TypeError, OSError) as error:
        _fail([str(error)])
    notes = [f"--api-key: set {name}={shlex.quote(value)} where Mell starts" for name, value in keys.items()]
    whole = whole_of(translation)
    return Conversion(
        whole, whole["applications"][0], comments_of(translation), [*translation.notes, *notes, *absent], left_out
    )


def _translated(flags: Flags, host: Host, least: int | None, most: int | None) -> tuple[Translation, list[str]]:
    """The translation of the flags that Mell does not refuse, and the lines on the others. Raises FlagsRefused."""
    try:
        return translate(flags, host, least, most), []
    except FlagsRefused as refused:
        kept = {name: value for name, value in flags.items() if name not in refused.names}
        return translate(kept, host, least, most), refused.lines


def _head(made: Conversion, source: str) -> list[str]:
    """The comment at the top of the file."""
    head = [f"Mell's configuration, made by `mell convert` from {source}."]
    for title, lines in (("Not carried over:", made.left_out), ("Notes:", made.notes)):
        if lines:
            head += [title, *(f"  {' '.join(line.split())}" for line in lines)]
    return head


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"mell convert: {line}", file=sys.stderr)


def _fail(lines: Iterable[str]) -> NoReturn:
    _say(lines)
    raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
