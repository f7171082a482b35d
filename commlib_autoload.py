"""Programs of torch on rings with one environment variable: ``FLAGS_comm_torch_backend=1``.

``import torch`` calls ``autoload``, the entry point "commlib" of the group "torch.backends". This
module is outside the package, so that without the flag nothing of the package is imported.
"""

import os

FLAG = "FLAGS_comm_torch_backend"


def autoload() -> None:
    """Put the groups of ``torch.distributed`` on rings if the flag is set."""
    if os.environ.get(FLAG, "0") == "0":
        return
    from commlib import flags

    if flags.get(FLAG):
        from commlib.compat import torch_distributed

        torch_distributed.replace_torch()
