"""Steps that a rollback of the job has undone, and that the script does not make again, because its loop is over.

A script makes the undone steps again when its loop asks for the next batch or, without a loader, when it steps. A
rollback that is noticed between two passes is therefore made up for by the next loop. After the last loop nothing asks.
Whether there is another loop is known only when the script ends. A script without a loader sees in the clock that a
step was one of a rollback; what it does then is its own decision.
"""

from __future__ import annotations

from ps_protocol.errors import InvalidRequest
from ps_runtime.signals import is_cut_short
from ps_worker.data.leased import StepData


def undone_steps(before: int | None, now: int, data: StepData) -> InvalidRequest | None:
    """Returns the error of a script that ends without the steps that a rollback has undone; None if none are missing,
    or if the script is interrupted.

    before: the steps before the rollback; None if there was none, or the script has stepped since, or goes by the clock
    now:    the steps after it
    """
    if before is None or before <= now or is_cut_short():
        return None
    if data.accounts and not data.is_behind:
        return None  # another worker has made up for it
    return InvalidRequest(
        f"the job was rolled back from clock {before} to clock {now}, and no loop of this script has repeated that: "
        f"the servers have nothing that it trained after clock {now}. Start this worker again: it continues from there "
        "while other workers still train, or if the servers restore the job (--restore); otherwise the job begins anew"
    )
