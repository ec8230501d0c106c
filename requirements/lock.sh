#!/usr/bin/env bash
# Regenerates requirements/*.lock from requirements/*.in (`make lock`).
#
#   UPGRADE=1   take the newest versions the .in files allow; without it, pins that still fit stay.
#
# uv does not read pip's settings. Behind a mirror, set UV_DEFAULT_INDEX; where the CPU build of
# torch lies in a folder, set UV_FIND_LINKS.
set -euo pipefail
cd "$(dirname "$0")"

tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"${PYTHON:-python3}" -m venv "$tools"
"$tools/bin/pip" install -q --disable-pip-version-check uv==0.13.8

# compile NAME [option ...]: resolves NAME.in into NAME.lock for the oldest supported Python.
# --only-binary also proves that nothing has to be built at installation.
compile() {
    local name=$1
    shift
    echo "Resolving requirements/$name.lock"
    "$tools/bin/uv" pip compile "$name.in" --output-file "$name.lock" --quiet \
        --python-version 3.11 --python-platform x86_64-manylinux_2_35 --only-binary :all: \
        --no-header --no-annotate ${UPGRADE:+--upgrade} "$@"
}

# head_comment NAME LINE...: puts comment lines above the pins of NAME.lock.
head_comment() {
    local name=$1
    shift
    { printf '# %s\n' "$@"; grep -v '^#' "$name.lock"; } >"$tools/$name.lock"
    cat "$tools/$name.lock" >"$name.lock"
}

made="Made by 'make lock' from requirements"

# The CPU build of torch is not on every index: without it there, uv goes to PyTorch's own.
cpu=(--excludes cpu.excludes --excludes runtime.excludes)
compile cpu "${cpu[@]}" || compile cpu "${cpu[@]}" --torch-backend cpu
head_comment cpu "$made/cpu.in. Linux x86-64, Python 3.11 to 3.13. Install with --no-deps."

# A folder holding the CPU build of torch would win over the CUDA one, as 2.x+cpu sorts above 2.x.
UV_FIND_LINKS='' compile cuda --excludes runtime.excludes
head_comment cuda "$made/cuda.in. Linux x86-64, CUDA 13, Python 3.11 to 3.12. Install with --no-deps." \
    "Resolved, but not yet run on a machine with a GPU."

# Both devices share this one, so it has to agree with both.
compile dev --constraints cpu.lock --constraints cuda.lock
head_comment dev "$made/dev.in. Install with --no-deps next to cpu.lock or cuda.lock."
