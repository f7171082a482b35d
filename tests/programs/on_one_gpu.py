"""Run a program on a GPU that all ranks of a launcher share.

Its arguments are those of ``python``: ``-m MODULE ...`` or ``FILE ...``.
"""

import os
import runpy
import sys

from tests.support.ranks import alone_on_a_host


def main() -> None:
    """Become the program."""
    os.environ.update(alone_on_a_host(int(os.environ["RANK"])))
    if sys.argv[1] == "-m":
        del sys.argv[:2]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        del sys.argv[0]
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
