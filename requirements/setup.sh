#!/usr/bin/env bash
# Makes .venv hold exactly what the lock files pin (`make setup`); returns at once if it already does.
#
#   DEVICE=cpu|cuda   default: what .venv was last set up for, else cpu
#   PYTHON=python3    the interpreter .venv is made with
set -euo pipefail
cd -P "$(dirname "$0")/.."

venv=.venv
state_file=$venv/.setup-state
# The CPU build of torch is on PyTorch's own index, not on the usual one.
torch_cpu_index=https://download.pytorch.org/whl/cpu

say() { echo "setup: $*"; }
die() {
    echo "setup: $*" >&2
    exit 1
}

# .venv must not be made with its own interpreter, which comes first where it is activated.
PATH=$(tr : '\n' <<<"$PATH" | grep -vxF "$PWD/$venv/bin" | paste -sd:)
python=${PYTHON:-python3}
state=$(cat "$state_file" 2>/dev/null || true)
device=${DEVICE:-}
if [[ -z $device ]]; then
    [[ $state == *device=cuda* ]] && device=cuda || device=cpu
fi
[[ $device == cpu || $device == cuda ]] || die "DEVICE is '$device', but has to be cpu or cuda."
building="unfinished device=$device"
locks=("requirements/$device.lock" requirements/dev.lock)

newest=13
[[ $device == cuda ]] && newest=12 # one of its packages, cuda-python, has no newer build
command -v "$python" >/dev/null || die "'$python' was not found. Install Python 3.11 to 3.$newest, or name one with PYTHON=."
version=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])')
"$python" -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, $newest))" ||
    die "'$python' is Python $version, but $device needs Python 3.11 to 3.$newest. Name one with PYTHON=, e.g. PYTHON=python3.12."

# The path is part of the key because a virtual environment does not survive being moved.
key="device=$device python=$version locks=$(cat "${locks[@]}" | sha256sum | cut -c1-16) path=$PWD"

# The project runs from its source tree and is not installed, so pip makes no `mell` command of it. Mell's imports come
# from here (-P), whatever the folder holds in which the command is run.
write_command() {
    local command=$venv/bin/mell text
    printf -v text '%s\n' '#!/usr/bin/env bash' '# Made by requirements/setup.sh.' \
        "export PYTHONPATH=$(printf %q "$PWD")\${PYTHONPATH:+:\$PYTHONPATH}" \
        "exec $(printf %q "$PWD/$venv/bin/python") -P -m app.cli \"\$@\""
    [[ -x $command ]] && cmp -s "$command" - <<<"${text%$'\n'}" && return
    printf %s "$text" >"$command.new"
    chmod +x "$command.new"
    mv "$command.new" "$command"
}

# Two runs at once would install over each other. The script is its own lock file.
exec 9<requirements/setup.sh
flock 9
state=$(cat "$state_file" 2>/dev/null || true) # it may have changed while waiting
venv_version=$("$venv/bin/python" -c 'import pip, sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null || true)
if [[ $state == "$key" && $venv_version == "$version" ]]; then
    write_command
    exit 0
fi

[[ "$(uname -s) $(uname -m)" == "Linux x86_64" ]] ||
    die "the lock files are for Linux on x86-64, and this is $(uname -s) on $(uname -m). Use a Linux x86-64 machine or container."
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "'$python' lacks the venv module. Install it (Debian, Ubuntu: apt-get install python3-venv) and run this again."

if [[ $device == cuda ]] && ! command -v "${CXX:-g++}" >/dev/null; then
    say "no C++ compiler was found, with which Triton and torch compile GPU kernels: apt-get install g++ python3-dev"
fi

pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }
pip_install() { pip install --no-deps "$@"; }

# names FILE...: the packages pinned in lock files or in a `pip freeze`, spelled one way.
names() { sed -n 's/==.*//p' "$@" | tr 'A-Z_.' 'a-z--' | sort -u; }

# Whatever stopped an earlier run half-way could have left a package half-written, so begin anew then.
# Likewise for another device, as torch==2.x is satisfied by either build of it. Otherwise a complete
# environment is brought up to date in place, which spares most of the download.
if [[ $state == unfinished* || ( -n $state && $state != "device=$device "* ) || $venv_version != "$version" ]] ||
    ! grep -qsF "$PWD/$venv/" "$venv/bin/pip"; then
    say "creating $venv with Python $version"
    rm -rf "$venv"
    mkdir "$venv"
    echo "$building" >"$state_file"
    "$python" -m venv "$venv"
fi
echo "$building" >"$state_file"

wanted=$(names "${locks[@]}")

# Left by an earlier lock or by hand. Not harmless: a CUDA build of torchvision breaks a CPU set-up.
# Before installing, because packages that replace each other own the same files.
mapfile -t extra < <(comm -13 <(printf 'pip\n%s\n' "$wanted" | sort) <(pip list --format=freeze | names))
if ((${#extra[@]})); then
    say "removing what the lock files do not name: ${extra[*]}"
    pip uninstall --yes --quiet "${extra[@]}"
fi

if [[ $device == cpu ]]; then
    torch=$(grep '^torch==' requirements/cpu.lock)
    say "installing $torch"
    exec 3>&1 # pip's progress stays visible while its errors are kept
    if ! first_error=$(pip_install "$torch" 2>&1 >&3); then
        say "$torch is not to be had from the configured index; trying PyTorch's own"
        pip_install --index-url "$torch_cpu_index" "$torch" || {
            echo "$first_error" >&2
            die "$torch could be had neither from the configured index (the error just above) nor from" \
                "$torch_cpu_index (the one before). Allow access to that address, or put the wheel" \
                "into a folder, set PIP_FIND_LINKS to it, and run this again."
        }
    fi
fi

# counted TOTAL: turns pip's several lines per package into a count, on one line if on a terminal.
counted() {
    local end='\n' step=25
    [[ -t 1 ]] && end='\r' step=1
    awk -v total="$1" -v end="$end" -v step="$step" '
        function finish() { if (n && end == "\r") print ""; n = 0 }
        /^(Collecting|Processing|Requirement already)/ && (++n % step == 0) {
            printf "setup: %d of %d packages found" end, n, total; fflush()
        }
        /^Installing collected/ { finish(); print "setup: all found, unpacking"; fflush() }
        END { finish() }'
}

# watch_unpacking TOTAL: says how far pip is with unpacking, about which it is silent for minutes. Runs until it is killed.
watch_unpacking() {
    local before=0 now
    while sleep 5; do
        now=$(compgen -G "$venv/lib/python*/site-packages/*.dist-info" | grep -vc '/pip-' || true)
        if ((now > before && before > 0)); then say "$now of $1 packages unpacked"; fi
        before=$now
    done
}

count=$(wc -w <<<"$wanted")
say "installing $count packages for $device; the first time this takes minutes and several GB"
watch_unpacking "$count" 9>&- &
watcher=$!
disown
trap 'kill $watcher 2>/dev/null' EXIT
pip_install "${locks[@]/#/--requirement=}" | counted "$count" ||
    die "a package could not be installed (pip says which, above). Check the network and free disk space, and run this again."

kill $watcher
trap - EXIT

"$venv/bin/python" - "$device" <<'PY' || die "the torch that pip chose is not the one for $device. See that no index or PIP_FIND_LINKS offers the other build, and run this again."
import sys
from importlib.metadata import version

# `torch==2.x` on a cuda lock also lets an index serve a 2.x+cpu build.
cpu_build = version("torch").endswith("+cpu")
sys.exit(0 if cpu_build == (sys.argv[1] == "cpu") else f"torch is {version('torch')}, wanted for {sys.argv[1]}")
PY

write_command
echo "$key" >"$state_file"
say "done: $venv is set up for $device"
