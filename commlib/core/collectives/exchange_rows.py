"""The exchange of single rows between ranks."""

from typing import Any

import torch

from commlib.core.calls.call import Call
from commlib.core.dispatch import dispatch, is_plain
from commlib.core.ring import Ring
from commlib.core.stream_mode import MODES
from commlib.core.validation import check_pair
from commlib.p2p.routes import Routes

Tensor = torch.Tensor


class ExchangeRows(Ring):
    """The collective of a ring in which ranks send single rows."""

    def _exchange_rows(
        self,
        out: Tensor,
        x: Tensor,
        routes: Routes,
        *,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
        by_all: bool = True,
    ) -> Any:
        """Fill the 2-D ``out`` with rows of every rank's 2-D ``x``, each where ``routes`` says.

        Every member calls it with the routes that belong together; nothing checks that here. On
        GPUs of one host the first call sets a channel up and blocks the host for it.
        ``by_all=False``: ranks without rows need not make the call, so it is in no log of calls.
        """
        plain = is_plain(self, x, out)
        if not plain:
            check_pair(self, "exchange_rows", out, x)
        # Every rank takes part in what any rank does.
        elements = routes.most * x.shape[1]
        launch = self._engine.own_rows
        if elements:
            launch = self._engine.exchange_rows
            self._engine.prepare_rows()
        entry = ("exchange_rows", elements, x.dtype, None, None) if by_all else None
        call = Call("exchange_rows", launch, (routes,), out, x, None, plain, entry, out)
        return dispatch(self, call, MODES[use_calc_stream, sync_op, fenced])
