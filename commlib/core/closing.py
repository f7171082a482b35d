"""The end of several rings at once."""

from functools import partial

import torch

from commlib import flags
from commlib.core.context import CommContext
from commlib.deadlines import Deadline
from commlib.rendezvous.roll_call import RollCall
from commlib.worker_threads import workers


def close_all(rings: list[CommContext]) -> list[Exception]:
    """Close ``rings`` one after the other; an error of one does not keep the others open."""
    errors = []
    for ring in rings:
        try:
            ring._close(Deadline(flags.get(flags.CLOSE_TIMEOUT)))
        except Exception as error:
            errors.append(error)
    return errors


def abort_all(rings: list[CommContext], deadline: Deadline) -> list[Exception]:
    """Abort ``rings`` at the same time; those that take longer go on alone."""
    tasks = [
        workers.start(partial(_abort, ring), f"aborting ring {ring.ring_id}") for ring in rings
    ]
    errors = []
    for task in tasks:
        if task is not None and task.wait(deadline.left()) and task.error is not None:
            errors.append(task.error)
    return errors


def _abort(ring: CommContext) -> None:
    if ring.device.type == "cuda":  # a thread begins on GPU 0 and would make a context there
        torch.cuda.set_device(ring.device)
    ring.abort()


def end_all(calls: list[RollCall]) -> None:
    """End roll calls that no creation uses any more."""
    for call in calls:
        call.end()
