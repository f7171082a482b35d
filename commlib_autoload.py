"""Programs of torch on rings with one environment variable: ``FLAGS_comm_torch_backend=1``.

``import torch`` calls ``autoload``, the entry point "commlib" of the group "torch.backends". This
module is outside the package, so that without the flag nothing of the package is imported.
"""

import os

FLAG = "FLAGS_comm_torch_backend"


def autoload() -> None:
    """Put the groups of ``torch.distributed`` on rings if the flag is set.

    Raises:
        SystemExit: A flag has a wrong value. torch would put any other error below its own text
            and two tracebacks.
    """
    if os.environ.get(FLAG, "").strip() in ("", "0"):
        return
    try:
        from commlib import flags

        wanted = flags.get(FLAG)
    except ValueError as error:
        if type(error).__name__ != "FlagError":  # a class of a package that was not imported
            raise
        raise SystemExit(f"import torch: {error}") from None
    if wanted:
        from commlib.compat import torch_distributed

        torch_distributed.replace_torch()
