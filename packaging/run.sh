#!/usr/bin/env bash
# Sets up what Parley needs and starts it.
#
#   packaging/run.sh               the window; where there is no display, a conversation that is printed
#   packaging/run.sh --headless    the printed conversation: the bundled model, bundled sound and pictures
#   packaging/run.sh COMMAND ...   any other command of Parley; `--help` lists them
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# -P: the folder we are called from, which may hold an app/ of its own, is not searched for modules.
parley() { PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$root/.venv/bin/python" -P -m app "$@"; }

has_display() { [ -n "${DISPLAY:-}${WAYLAND_DISPLAY:-}" ] || [ "$(uname -s)" = Darwin ]; }

bash "$root/packaging/setup.sh"

if [ "${1:-}" = --headless ]; then
  parley demo "${@:2}"
elif [ $# -gt 0 ]; then
  parley "$@"
elif has_display; then
  parley
else
  parley demo
fi
