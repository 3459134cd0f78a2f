"""Prints what pyproject.toml requires, one line each: `requirements.py [GROUP...]` adds dependency groups.

For pip before 25.1, which cannot install a dependency group.
"""

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, groups: list[str]) -> list[str]:
    """Return the dependencies of `pyproject`, then those of each of `groups`."""
    content = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    found = list(content["project"]["dependencies"])
    for group in groups:
        found += content["dependency-groups"][group]
    return found


if __name__ == "__main__":
    print("\n".join(requirements(Path(__file__).resolve().parent.parent / "pyproject.toml", sys.argv[1:])))
