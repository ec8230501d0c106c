"""Names for the weights of a model, or of an adapter, beyond the path or the hub name that they were loaded by.

A hub name stands for the commit that its revision led to. Files at a path are named by their content, since somebody
may have put others there under the same names and with the same sizes. Up to `WHOLE_BYTES` all of it is read. Of larger
files, it is the head, which has the names, types and shapes of the tensors, the beginning of every tensor, and a page
in every `STRIDE`: of 140 GB about half a gigabyte, which takes a second where the engine's loading has left the files
in memory. Weights that were trained further differ everywhere. A change of a few rows of one tensor may go unnoticed.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.file_download import repo_folder_name

WHOLE_BYTES = 1 << 30
STRIDE = 1 << 20
_PAGE = 4096
_AT_ONCE = 16
_LONGEST_HEAD = 100 << 20
"""The longest head that the format of safetensors allows, in bytes."""

_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".py")
_NAMES = ("adapter", "tokenizer", "vocab", "merges", "spiece", "tekken")
"""How the names of files begin that adapters have, or that make tokens of texts."""

_COMMIT = re.compile("[0-9a-f]{40}")


def name_weights(model: str, revision: str | None, download_dir: str | None = None) -> str:
    """The commit of a hub name, or the content of the files at a path; empty for anything else, such as a URL.

    Raises:
        OSError: a file cannot be read.
    """
    path = Path(model)
    return name_content(path) if path.exists() else _commit(model, revision or "main", download_dir)


def name_content(path: Path) -> str:
    """A digest of a file, or of the files with weights, code and tokenizers in a folder. Raises OSError."""
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file() and _counts(each))
    sizes = [each.stat().st_size for each in files]
    whole = sum(sizes) <= WHOLE_BYTES
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        contents = pool.map(lambda file: _digest(file, whole), files)
        parts = [f"{file.name}|{size}|{content}" for file, size, content in zip(files, sizes, contents, strict=True)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _counts(file: Path) -> bool:
    return file.suffix in _FILES or file.name.startswith(_NAMES)


def _digest(file: Path, whole: bool) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb", buffering=0) as opened:
        if whole:
            while part := opened.read(STRIDE):
                digest.update(part)
        else:
            fd = opened.fileno()
            # The kernel would read far more than the pages that are asked for.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            for offset, size in _samples(fd):
                digest.update(os.pread(fd, size, offset))
    return digest.hexdigest()


def _samples(fd: int) -> Iterator[tuple[int, int]]:
    """The parts of a large file that name it: offsets and sizes."""
    size, head = os.fstat(fd).st_size, 0
    begins: list[int] = []
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if 2 <= length <= min(size, _LONGEST_HEAD):  # else it is of another format
        try:
            tensors = json.loads(os.pread(fd, length, 8))
            begins = [tensor["data_offsets"][0] for name, tensor in tensors.items() if name != "__metadata__"]
            head = 8 + length
        except (ValueError, TypeError, KeyError, AttributeError):
            begins = []
    yield 0, head or _PAGE
    for offset in sorted({*(head + begin for begin in begins), *range(0, size, STRIDE)}):
        yield offset, _PAGE
    yield max(0, size - _PAGE), _PAGE


def _commit(name: str, revision: str, download_dir: str | None) -> str:
    """The commit of a revision as it was when its files were last fetched here; empty if none were."""
    if _COMMIT.fullmatch(revision):
        return revision
    try:
        folder = repo_folder_name(repo_id=name, repo_type="model")
    except HFValidationError:
        return ""
    for cache in filter(None, (download_dir, constants.HF_HUB_CACHE)):
        reference = Path(cache, folder, "refs", revision)
        if reference.is_file():
            return reference.read_text().strip()
    return ""
