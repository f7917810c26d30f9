#!/usr/bin/env bash
# Every check of the project: ruff, ruff format, mypy --strict, clang-format, pytest.  Arguments go to pytest, which runs
# on 2 workers; CUFLASH_TEST_WORKERS=0 runs it in one process.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# The compile tests need CuPy and NVRTC, which work without a GPU.
extra=$(cupy_extra)
if [[ -z $extra && $(uname -s) == Linux ]]; then extra=cuda13; fi
prepare_environment ${extra:+"$extra"} test
cd "$root"
bin=$venv/bin

step() {
  local name=$1 remedy=$2 started=$SECONDS
  shift 2
  "$@" >&2 || fail "$name failed; $remedy"
  say "ok  $name ($((SECONDS - started)) s)"
}
cuda_sources=()
while IFS= read -r file; do cuda_sources+=("$file"); done < <(find cuflash -name '*.cu' -o -name '*.cuh' | sort)

step "ruff check" "many findings go away with: .venv/bin/ruff check --fix" "$bin/ruff" check --quiet .
step "ruff format" "run: .venv/bin/ruff format" "$bin/ruff" format --check --quiet .
step "mypy --strict" "the types above need a look" "$bin/mypy" --no-error-summary
step "clang-format" "run: .venv/bin/clang-format -i FILE" "$bin/clang-format" --dry-run -Werror "${cuda_sources[@]}"

# Workers share the cores, so each keeps its matrix products to one.
export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" -m pytest -n "${CUFLASH_TEST_WORKERS:-2}" --dist worksteal "$@"
