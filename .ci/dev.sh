# Sourced by stages: the development environment that the stage `install` made.
set -euo pipefail
PATH="$CI_WORK/dev/bin:$PATH"
export PIP_CONSTRAINT="$PWD/.ci/constraints.txt"
source .ci/install.sh
