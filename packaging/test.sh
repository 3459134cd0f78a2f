#!/usr/bin/env bash
# Sets up what Parley needs and runs every check; arguments go to pytest.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"

bash packaging/setup.sh dev

# No test may reach for the network or the screen.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
if [ -z "${DISPLAY:-}${WAYLAND_DISPLAY:-}" ]; then export QT_QPA_PLATFORM="${QT_QPA_PLATFORM:-offscreen}"; fi
export PATH="$root/.venv/bin:$PATH"

failed=()
check() { # check NAME COMMAND...: all of them run, whatever the earlier ones said
  printf '\n== %s\n' "$1"
  "${@:2}" || failed+=("$1")
}

check "ruff check" ruff check .
check "ruff format" ruff format --check .
check "mypy" mypy
check "import-linter" lint-imports --no-logo
check "pytest" python -m pytest "$@"

echo
if [ ${#failed[@]} -gt 0 ]; then
  printf 'NOT OK:'
  printf ' [%s]' "${failed[@]}"
  echo
  exit 1
fi
echo "OK: ruff check, ruff format, mypy, import-linter, pytest"
