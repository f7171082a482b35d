"""Groups of the legacy dialect in live ranks, which other tests use too."""

from collections.abc import Iterator
from contextlib import contextmanager

from commlib.compat.paddle.distributed import groups

FIRST_ID = 900  # of no other test


@contextmanager
def own_groups() -> Iterator[None]:
    """Give new groups numbers from FIRST_ID on in a ``with`` block, and destroy them after it."""
    before, groups._groups.next_id = groups._groups.next_id, FIRST_ID
    try:
        yield
    finally:
        for group in list(groups._groups.by_id.values()):
            groups.destroy_process_group(group)
        groups._groups.next_id = before
