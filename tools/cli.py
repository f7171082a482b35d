"""Entry point of the command `commlib`, which checks for its packages before it imports them."""

import sys
from importlib.util import find_spec

PACKAGES = ("click", "rich")


def main() -> int:
    """Run the command; return 2 if packages of the extra `tools` are missing."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        print(
            f"commlib: {' and '.join(missing)} {are} not installed; "
            "run pip install '/path/to/commlib[tools]'",
            file=sys.stderr,
        )
        return 2
    from commlib.tools.commands import commands

    commands(prog_name="commlib")
    return 0
