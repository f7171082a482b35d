"""The entry of the command `commlib`: it looks for its packages before it imports them."""

import sys
from importlib.util import find_spec

PACKAGES = ("click", "rich")


def main() -> int:
    """Run the command; return 2 where packages of the extra `tools` are missing."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        what = " and ".join(missing)
        print(f"commlib: no {what} here; type pip install 'commlib[tools]'", file=sys.stderr)
        return 2
    from commlib.tools.commands import commands

    commands(prog_name="commlib")
    return 0


if __name__ == "__main__":
    sys.exit(main())
