# Sourced by `.ci/run` and `.ci/full`, which are lists of stages. A stage is a script in `.ci/stages`, called in the root of
# the checkout with the variables below; what it exits with decides.
#
#   stage NAME [ARGUMENT...]    run it; where it fails, `run` ends there and `full` goes on
#   beside NAME [ARGUMENT...]   start it; `joined NAME` waits for it, prints what it printed, and counts as its stage
#   finish                      wait for all stages beside, print the table, exit
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=$(mktemp -d)
# Stages find one another's results here: dev (the development environment), dist (wheels), site, lists of seconds.
export CI_WORK=$work
export CI_PYTHON=${PYTHON:-$(command -v python3)}
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1
# The value that pip gives its option "compile": of the 26,000 modules that are installed, Python compiles those it imports.
export PIP_NO_COMPILE=0
export MMROLLOUTS_HYPOTHESIS_PROFILE=repeatable   # tests/conftest.py
unset PYTHONDONTWRITEBYTECODE   # the modules that a stage has compiled are there for the next

declare -A started
failed=()
chosen=("$@")   # of .ci/full: the names of the stages to run, all without any
leave() {
  local status=$? group
  for group in "${started[@]}"; do kill -- "-$group" 2> /dev/null; done
  rm -rf "$work"
  exit "$status"
}
trap leave EXIT
trap 'exit 130' INT TERM

is_chosen() {
  [[ ${#chosen[@]} == 0 || $1 == install ]] && return
  local name
  for name in "${chosen[@]}"; do [[ $1 == "$name" ]] && return; done
  return 1
}

timed() {   # NAME ARGUMENT...: with seconds and processor seconds in the table
  exec setsid --wait python3 .ci/timed.py "$work/table" "$1" ".ci/stages/$1" "${@:2}" < /dev/null
}

ended() {   # NAME STATUS
  [[ $2 == 0 ]] && return
  printf '== %s failed (exit %s) ==\n' "$1" "$2"
  failed+=("$1")
  if [[ ${CONTINUE:-} != yes || $1 == install ]]; then finish; fi
}

stage() {
  is_chosen "$1" || return 0
  printf '\n== %s (at %ss) ==\n' "$*" "$SECONDS"
  local status=0
  (timed "$@") || status=$?
  ended "$1" "$status"
}

beside() {
  is_chosen "$1" || return 0
  (timed "$@") > "$work/$1.log" 2>&1 &
  started[$1]=$!
}

joined() {
  [[ -n ${started[$1]:-} ]] || return 0
  local status=0
  wait "${started[$1]}" || status=$?
  unset "started[$1]"
  printf '\n== %s (run beside others; ended at %ss) ==\n' "$1" "$SECONDS"
  cat "$work/$1.log"
  ended "$1" "$status"
}

finish() {
  local name
  if [[ ${#failed[@]} == 0 || ${CONTINUE:-} == yes ]]; then
    for name in "${!started[@]}"; do joined "$name"; done
  fi
  printf '\n%-24s %8s %10s  %s\n' stage seconds "processor s" ""
  cat "$work/table"
  printf '%-24s %8d\n' "in all" "$SECONDS"
  if [[ ${#failed[@]} != 0 ]]; then
    printf 'failed: %s\n' "${failed[*]}"
    exit 1
  fi
  exit 0
}
