"""`parley doctor`: one line for each thing that Parley needs, ok or what to do."""

import argparse

from engine import examine


def run(options: argparse.Namespace) -> int:
    """Print the examination; exit code 1 where something needs doing."""
    checks = examine(options.model)
    for check in checks:
        print(check)
    num_problems = sum(not check.ok for check in checks)
    print("\nall is well" if not num_problems else f"\n{num_problems} of {len(checks)} lines need attention")
    return 1 if num_problems else 0
