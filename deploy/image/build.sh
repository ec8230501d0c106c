#!/usr/bin/env bash
# Builds Mell's image (`make image`): Debian's base by mmdebstrap, the packages by this machine's pip, the rest by buildah.
#
#   DEVICE=cpu|cuda   default: cpu
#   PYTHON=python3    has to be Debian 12's version, since its pip chooses the packages
#   IMAGE=NAME        default: mell:VERSION for CUDA, mell:VERSION-cpu
#
# Prints the image's name on standard output. `build.sh --lacks` prints the tools that this machine lacks instead.
set -euo pipefail
cd -P "$(dirname "$0")/../.."

tools=(mmdebstrap buildah podman runc)
base=localhost/mell-base:bookworm
base_python=3.11

say() { echo "image: $*" >&2; }
die() {
    say "$@"
    exit 1
}

lacks=$(for tool in "${tools[@]}"; do command -v "$tool" >/dev/null || echo "$tool"; done | paste -sd' ')
if [[ ${1:-} == --lacks ]]; then
    echo "$lacks"
    exit 0
fi

device=${DEVICE:-cpu}
python=${PYTHON:-python3}
version=$(sed -n 's/^VERSION = "\(.*\)"$/\1/p' app/versions.py)
[[ $device == cuda ]] && image=${IMAGE:-mell:$version} || image=${IMAGE:-mell:$version-cpu}
[[ $device == cpu || $device == cuda ]] || die "DEVICE is '$device', but has to be cpu or cuda."
[[ -z $lacks ]] || die "$lacks cannot be found. Install them (Debian: apt-get install ${tools[*]}), or run" \
    "docker build -f deploy/Containerfile --build-arg DEVICE=$device -t $image ."
found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || die "'$python' does not run."
[[ $found == "$base_python" ]] ||
    die "'$python' is Python $found, but the image has $base_python. Name one with PYTHON=, e.g. PYTHON=python$base_python."

if ! podman image exists "$base"; then
    say "making $base"
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    mmdebstrap --quiet --variant=minbase --dpkgopt='path-exclude=/usr/share/doc/*' \
        --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' bookworm "$work/base.tar" >&2
    podman import --quiet "$work/base.tar" "$base" >&2
fi

lock=requirements/$device.lock
wheels=$PWD/.image/$device-$(sha256sum <"$lock" | cut -c1-16)
if [[ ! -d $wheels ]]; then
    say "downloading the packages of $lock"
    rm -rf .image
    download() { "$python" -m pip download --quiet --no-deps --dest "$wheels.new" "$@" >&2; }
    if [[ $device == cpu ]]; then
        # Its build of torch is on PyTorch's own index, if not on the usual one.
        torch=$(grep '^torch==' "$lock")
        download "$torch" || download --index-url "$(sed -n 's/^ARG TORCH_INDEX=//p' deploy/Containerfile)" "$torch"
    fi
    download --find-links "$wheels.new" --requirement "$lock"
    mv "$wheels.new" "$wheels"
fi

say "building $image"
# Buildah's own limits are higher, and cannot be set everywhere.
buildah build --runtime runc --isolation oci --network host --layers --file deploy/Containerfile --tag "$image" \
    --ulimit nofile=20000:20000 --ulimit nproc=20000:20000 --build-arg BASE="$base" \
    --build-arg DEVICE="$device" --build-arg PIP_FIND_LINKS=/packages --build-arg PIP_NO_INDEX=1 \
    --volume "$wheels:/packages:ro" . >&2
say "$image has $(podman image inspect --format '{{.Size}}' "$image" | numfmt --to=si --suffix=B)"
echo "$image"
