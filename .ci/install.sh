# Sourced by bash: `install_into PYTHON ARGUMENT...` is `PYTHON -m pip install ARGUMENT...`, done by uv where it is on PATH:
# an environment of ours takes it half a minute, and pip three. uv reads no configuration of pip; what says where packages
# are found is passed on.

export_for_uv() {   # a setting of pip, the variable of uv
  local section value
  for section in :env: global; do
    if value=$("${PYTHON:-python3}" -m pip config get "$section.$1" 2> /dev/null); then
      value=${value//$'\n'/ }
      export "$2=${value// /,}"
      return
    fi
  done
}

export_for_uv index-url UV_DEFAULT_INDEX
export_for_uv find-links UV_FIND_LINKS

install_into() {
  if command -v uv > /dev/null; then
    uv pip install --quiet --python "$@"
  else
    "$1" -m pip install --quiet --disable-pip-version-check "${@:2}"
  fi
}
