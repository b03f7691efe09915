#!/usr/bin/env bash
# A real SGLang that runs on the CPU, in a virtual environment: tests/real/setup_sglang.sh [DIRECTORY]
#
# DIRECTORY: the argument, else MMROLLOUTS_SGLANG_VENV, else mmrollouts/sglang-VERSION in the user's cache. 3 GB, a minute
# with uv on PATH, else three; nothing is done where the same versions are there already. Prints the directory, and nothing
# else, to stdout. pip must be able to find torch's build for the CPU (2.13.0+cpu): an index or a folder of wheels.
#
# The index has SGLang's kernels, and those of others that it depends on, for GPUs only. They are left out;
# sglang_on_cpu/sgl_kernel stands in for the names that SGLang imports when it starts.
set -euo pipefail

version=0.5.23
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${1:-${MMROLLOUTS_SGLANG_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/mmrollouts/sglang-$version}}
python=${PYTHON:-python3}
# What the caller constrains or forbids is meant for another environment.
unset PIP_CONSTRAINT PIP_REQUIRE_VIRTUALENV PYTHONPATH PYTHONHOME

wanted="sglang $version, set-up 1"
stamp="$venv/mmrollouts-stamp"

mkdir -p "$venv"
exec 9> "$venv.lock"
flock 9   # two runs at once: the second finds the work done
if [[ -f $stamp && $(< "$stamp") == "$wanted" ]]; then
  echo "$venv"
  exit 0
fi

{
  source "$here/../../.ci/install.sh"
  rm -f "$stamp"
  "$python" -m venv "$venv"
  # What SGLang's server imports of its requirements, in the versions that it requires (but for torch).
  install_into "$venv/bin/python" "torch==2.13.0+cpu" "transformers==5.19.0" "tokenizers==0.23.2" \
    aiohttp "apache-tvm-ffi==0.1.11" "blobfile==3.0.0" cloudpickle "compressed-tensors==0.18.0" dill distro einops fastapi \
    gguf interegular IPython "llguidance>=1.7.6,<2" msgspec ninja "numba==0.65.1" numpy "openai==2.8.0" \
    "openai-harmony==0.0.4" orjson "outlines==0.1.11" packaging partial_json_parser pillow prometheus-client psutil \
    pybase64 pydantic "python-dateutil<3" python-multipart pyzmq regex requests scipy "sentencepiece==0.2.1" \
    setproctitle "soundfile==0.13.1" tiktoken tqdm "uvicorn>=0.51" uvloop watchfiles xxhash zstandard
  install_into "$venv/bin/python" --no-deps "sglang==$version" "xgrammar==0.2.7" triton torchvision==0.28.0
  "$venv/bin/python" "$here/../../.ci/torchvision_on_cpu.py"
  SGLANG_USE_CPU_ENGINE=1 PYTHONPATH="$here/sglang_on_cpu" "$venv/bin/python" -c \
    "import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler, sglang.srt.models.qwen3_vl"
  echo "$wanted" > "$stamp"
} >&2
echo "$venv"
