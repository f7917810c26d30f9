#!/usr/bin/env bash
# Installs cuflash into .venv, with CuPy where there is an NVIDIA GPU, and runs `python -m cuflash` with the arguments.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

extra=$(cupy_extra)
prepare_environment ${extra:+"$extra"}
exec "$python" -m cuflash "$@"
