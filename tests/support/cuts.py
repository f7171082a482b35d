"""An operator at which graphs of the compile backend are cut."""

import torch


@torch.library.custom_op("graph_tests::cut", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def cut(x: torch.Tensor) -> torch.Tensor:
    """Return a multiple; graphs are cut here."""
    return x * 3


cut.register_fake(torch.empty_like)
cut.register_autograd(lambda ctx, grad: grad * 3)
