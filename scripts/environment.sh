# shellcheck shell=bash
# Sourced by the entry points beside it.  `prepare_environment EXTRA...` leaves the repository's .venv with the package
# and these extras installed, and sets `python` to its interpreter.  Where all of that is in place already it does
# nothing, so a second run is quick and needs no network.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
python=$venv/bin/python

say() { printf '%s\n' "$*" >&2; }
fail() {
  say "error: $*"
  exit 1
}

# The first interpreter that runs and is new enough; PYTHON=... overrides the search.
find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
    if [[ $candidate == "${PYTHON:-}" ]]; then break; fi
  done
  fail "no Python 3.10 or newer was found${PYTHON:+ at PYTHON=$PYTHON}; install one, or set PYTHON to its path"
}

make_venv() {
  local base
  base=$(find_python) || exit 1
  say "creating .venv with $("$base" --version)"
  rm -rf -- "$venv"
  "$base" -m venv "$venv" >&2 || fail "'$base -m venv' did not work; on Debian: apt-get install python3-venv"
}

# The file .venv/cuflash-ready lists what was installed: one line "KEY EXTRA" each.  KEY changes with the requirements.
prepare_environment() {
  local ready=$venv/cuflash-ready key extra missing="" started=$SECONDS
  if [[ -x $python ]] && ! "$python" -c '' 2>/dev/null; then rm -rf -- "$venv"; fi # its interpreter is gone
  # Only one CuPy package can live in an environment: another CUDA version than last time means a new one.
  for extra in "$@"; do
    if [[ $extra == cuda* && -f $ready ]] && grep -q ' cuda' "$ready" && ! grep -q " $extra\$" "$ready"; then
      say "this machine needs CuPy for another CUDA version than the one in .venv"
      rm -rf -- "$venv"
    fi
  done
  if [[ ! -x $python ]]; then make_venv; fi
  key=$({ printf '%s\n' "$root"; sed '/^\[tool\./,$d' "$root/pyproject.toml"; } | cksum | tr ' ' '-')
  for extra in base "$@"; do
    if [[ ! -f $ready ]] || ! grep -qx "$key $extra" "$ready"; then missing+=" $extra"; fi
  done
  if [[ -z $missing ]]; then return; fi
  local extras
  extras=$(IFS=,; printf '%s' "$*")
  say "installing cuflash${extras:+[$extras]} into .venv (up to 200 MB are fetched the first time)"
  "$python" -m pip install --quiet --disable-pip-version-check --editable "$root${extras:+[$extras]}" >&2 ||
    fail "pip could not install cuflash${extras:+[$extras]}; its message is above.  The first run needs the network"
  if ! grep -q "^$key " "$ready" 2>/dev/null; then : >"$ready"; fi
  for extra in base "$@"; do
    grep -qx "$key $extra" "$ready" || printf '%s %s\n' "$key" "$extra" >>"$ready"
  done
  say "installed in $((SECONDS - started)) s"
}

# Prints the extra that brings CuPy for this machine's driver; nothing where there is no NVIDIA GPU.
cupy_extra() {
  local interpreter=$python
  if ! "$interpreter" -c '' 2>/dev/null; then interpreter=$(find_python) || exit 1; fi
  "$interpreter" "$root/scripts/cupy_extra.py"
}
