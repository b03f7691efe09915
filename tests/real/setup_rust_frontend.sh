#!/usr/bin/env bash
# The Rust frontend of vLLM, the program `vllm-rs`: tests/real/setup_rust_frontend.sh [FILE]
#
# FILE: the argument, else MMROLLOUTS_VLLM_RS, else mmrollouts/vllm-rs-VERSION in the user's cache. Only the wheel of
# vLLM for CUDA has it: 500 MB are downloaded once, and the program alone is kept. Nothing is done where FILE is there
# already. Prints FILE, and nothing else, to stdout.
set -euo pipefail

version=0.33.0
program=${1:-${MMROLLOUTS_VLLM_RS:-${XDG_CACHE_HOME:-$HOME/.cache}/mmrollouts/vllm-rs-$version}}
python=${PYTHON:-python3}
# What the caller constrains or forbids is meant for another environment.
unset PIP_CONSTRAINT PIP_REQUIRE_VIRTUALENV PYTHONPATH PYTHONHOME

mkdir -p "$(dirname "$program")"
exec 9> "$program.lock"
flock 9   # two runs at once: the second finds the work done
if [[ ! -x $program ]]; then
  download=$(mktemp -d "$program.XXXXXX")
  trap 'rm -rf "$download"' EXIT
  {
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$download" "vllm==$version"
    "$python" - "$download" << 'PYTHON'
import pathlib, sys, zipfile

directory = pathlib.Path(sys.argv[1])
(wheel,) = directory.glob("vllm-*.whl")
zipfile.ZipFile(wheel).extract("vllm/vllm-rs", directory)
PYTHON
    chmod +x "$download/vllm/vllm-rs"
    mv "$download/vllm/vllm-rs" "$program"
  } >&2
fi
echo "$program"
