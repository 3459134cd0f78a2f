"""The engine runs where there is no user interface, and importing it has no side effect that needs one."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

IMPORT_ALL = """
import importlib, pkgutil, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"PySide6", "shiboken6", "qasync", "app"}:
            raise ImportError(f"the engine imports {name}")

sys.meta_path.insert(0, Blocked())
import engine
names = [module.name for module in pkgutil.walk_packages(engine.__path__, "engine.")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def test_every_engine_module_imports_without_a_user_interface() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) >= len(list((ROOT / "engine").rglob("[a-z]*.py"))) - 1
