#!/usr/bin/env bash
# Prepares this checkout: system libraries (where it may), .venv, Python packages.
#
#   packaging/setup.sh [GROUP...]     adds dependency groups of pyproject.toml, such as dev
#
# Says one line a step, and nothing when there is nothing to do. Set PYTHON to choose the interpreter.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"

# What a bare Debian lacks: the file the loader looks for, and the package that brings it.
system_libraries=(
  libGL.so.1:libgl1 libEGL.so.1:libegl1 libglib-2.0.so.0:libglib2.0-0 libfontconfig.so.1:libfontconfig1
  libdbus-1.so.3:libdbus-1-3 libxkbcommon.so.0:libxkbcommon0 libxkbcommon-x11.so.0:libxkbcommon-x11-0
  libxcb-cursor.so.0:libxcb-cursor0 libxcb-icccm.so.4:libxcb-icccm4 libxcb-keysyms.so.1:libxcb-keysyms1
  libxcb-shape.so.0:libxcb-shape0 libportaudio.so.2:libportaudio2
)

say() { printf 'parley: %s\n' "$*"; }
fail() {
  printf 'parley: %s\n' "$*" >&2
  exit 1
}

# Prints the command that makes us root, which may be empty; fails where we may not be.
become_root() {
  if [ "$(id -u)" -eq 0 ]; then return 0; fi
  if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    echo "sudo -n"
    return 0
  fi
  return 1
}

apt_install() {
  local as_root log
  command -v apt-get >/dev/null || return 1
  as_root="$(become_root)" || return 1
  say "installing with apt-get: $*"
  log="$(mktemp)"
  # Without a network this must end soon; $as_root is two words or none.
  # shellcheck disable=SC2086
  if { $as_root timeout 300 apt-get -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -qq update &&
    $as_root env DEBIAN_FRONTEND=noninteractive timeout 900 apt-get -o Acquire::Retries=1 \
      -o Acquire::http::Timeout=30 -qq install -y --no-install-recommends "$@"; } >"$log" 2>&1 </dev/null; then
    rm -f "$log"
    return 0
  fi
  say "apt-get failed: $(grep -m1 '^E:' "$log" || tail -n1 "$log")"
  rm -f "$log"
  return 1
}

missing_packages() {
  local known entry
  known="$({ command -v ldconfig >/dev/null && ldconfig -p || /sbin/ldconfig -p; } 2>/dev/null || true)"
  for entry in "${system_libraries[@]}"; do
    [[ "$known" == *"${entry%%:*} "* ]] || echo "${entry#*:}"
  done
  if [ -z "$(find /usr/share/fonts /usr/local/share/fonts -name '*.[to]tf' -print -quit 2>/dev/null)" ]; then
    echo fonts-dejavu-core
  fi
}

install_system_libraries() {
  local missing
  [ "$(uname -s)" = Linux ] || return 0 # elsewhere the wheels bring them
  mapfile -t missing < <(missing_packages)
  [ ${#missing[@]} -gt 0 ] || return 0
  apt_install "${missing[@]}" ||
    say "the window or the sound may not start before you install: ${missing[*]}"
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null && is_new_enough "$candidate"; then
      command -v "$candidate"
      return 0
    fi
  done
  return 1
}

make_venv() {
  local python version
  if ! python="$(find_python)"; then
    apt_install python3 python3-venv || fail "Python 3.11 or newer is needed: install python3 and python3-venv"
    python="$(find_python)" || fail "Python 3.11 or newer is needed, and the system's is older: set PYTHON to a newer one"
  fi
  say "creating .venv with $("$python" --version)"
  if command -v uv >/dev/null; then
    "$python" -m venv --clear --without-pip "$venv"
    return
  fi
  if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    version="$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')"
    apt_install "$version-venv" || fail "$python cannot create a .venv: install $version-venv (or python3-venv), then run this again"
  fi
  "$python" -m venv --clear "$venv"
}

venv_works() {
  [ -x "$venv/bin/python" ] && is_new_enough "$venv/bin/python" || return 1
  command -v uv >/dev/null || "$venv/bin/python" -m pip --version >/dev/null 2>&1
}

install_packages() { # standard input: the requirements
  local list errors status=0
  list="$(mktemp)"
  errors="$(mktemp)"
  cat >"$list"
  say "installing Python packages (PyTorch is large: the first time takes minutes)"
  if command -v uv >/dev/null; then
    # uv does not read pip's setting for a folder of wheels.
    if [ -n "${PIP_FIND_LINKS:-}" ]; then export UV_FIND_LINKS="${UV_FIND_LINKS:-$PIP_FIND_LINKS}"; fi
    uv pip install --quiet --python "$venv/bin/python" -r "$list" 2>"$errors" || status=$?
  else
    # One line for each large package and the rest in silence.
    "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off -r "$list" 2>"$errors" |
      sed -un 's/^ *Downloading \([^ ]*\) (\(.* [MG]B\))$/parley:   \1 (\2)/p; s/^Installing collected.*/parley:   unpacking/p' ||
      status=$?
  fi
  [ "$status" -eq 0 ] || cat "$errors" >&2
  rm -f "$list" "$errors"
  [ "$status" -eq 0 ] || fail "the Python packages could not be installed (see above); run this again to retry"
}

# What .venv must hold: the requirements and the interpreter they are for.
wanted() { "$venv/bin/python" "$root/packaging/requirements.py" "$@" && "$venv/bin/python" --version; }

is_ready() { [ -x "$venv/bin/python" ] && [ -f "$1" ] && [ "$(wanted "${@:2}" 2>/dev/null)" = "$(cat "$1")" ]; }

# `.venv/bin/parley` runs this checkout from anywhere; -P keeps the folder it is called from out of the search.
make_command() {
  local command="$venv/bin/parley"
  printf '#!/usr/bin/env bash\nPYTHONPATH="%s${PYTHONPATH:+:$PYTHONPATH}" exec "%s/bin/python" -P -m app "$@"\n' \
    "$root" "$venv" >"$command.new"
  chmod +x "$command.new"
  mv "$command.new" "$command"
}

main() {
  local stamp="$venv/.parley-${*:-app}"
  # Two at once would install into each other; the lock ends with this script.
  if command -v flock >/dev/null; then
    exec 9<"$root/pyproject.toml"
    flock 9
  fi
  install_system_libraries
  if is_ready "$stamp" "$@"; then
    [ -x "$venv/bin/parley" ] || make_command
    return 0
  fi
  venv_works || make_venv
  rm -f "$stamp"
  "$venv/bin/python" "$root/packaging/requirements.py" "$@" | install_packages
  # Written last, so that an interrupted installation is taken up again.
  wanted "$@" >"$stamp"
  wanted >"$venv/.parley-app"
  make_command
  say "ready"
}

main "$@"
