"""The scripts parse, ask for what pyproject.toml asks for, and start the right thing."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SCRIPTS = ("packaging/setup.sh", "packaging/run.sh", "packaging/test.sh", ".ci/run")


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_script_parses_and_may_be_executed(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)
    assert os.access(ROOT / script, os.X_OK)
    assert "set -euo pipefail" in (ROOT / script).read_text()


def test_the_requirements_are_those_of_the_project() -> None:
    script = str(ROOT / "packaging" / "requirements.py")
    alone = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert alone.stdout.splitlines() == PROJECT["project"]["dependencies"]
    with_dev = subprocess.run([sys.executable, script, "dev"], capture_output=True, text=True, check=True)
    assert with_dev.stdout.splitlines() == [*PROJECT["project"]["dependencies"], *PROJECT["dependency-groups"]["dev"]]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout that is set up already, whose Parley prints its arguments and where it was started."""
    root = tmp_path / "a folder with spaces"
    shutil.copytree(ROOT / "packaging", root / "packaging")
    shutil.copy(ROOT / "pyproject.toml", root)
    (root / "app").mkdir()
    (root / "app" / "__main__.py").write_text("import os, sys\nprint(sys.argv[1:], os.getcwd())\n")
    (root / "packaging" / "setup.sh").write_text("true\n")
    (root / ".venv" / "bin").mkdir(parents=True)
    (root / ".venv" / "bin" / "python").symlink_to(sys.executable)
    return root


@pytest.mark.parametrize(
    ("arguments", "display", "started"),
    [
        ([], "", ["demo"]),
        ([], ":0", []),
        (["--headless"], ":0", ["demo"]),
        (["--headless", "--quiet", "a b"], "", ["demo", "--quiet", "a b"]),
        (["doctor", "a b"], "", ["doctor", "a b"]),
        (["doctor"], ":0", ["doctor"]),
    ],
)
def test_run_starts_the_right_thing(
    checkout: Path, tmp_path: Path, arguments: list[str], display: str, started: list[str]
) -> None:
    environment = os.environ | {"DISPLAY": display, "WAYLAND_DISPLAY": ""}
    (tmp_path / "app").mkdir()  # a folder of the same name where we are called from is not ours
    done = subprocess.run(
        ["bash", str(checkout / "packaging" / "run.sh"), *arguments],
        capture_output=True, text=True, check=True, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert done.stdout == f"{started} {tmp_path}\n"
