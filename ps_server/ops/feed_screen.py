"""`ps-server feed`: follows a job's weights as a reader, and prints each edition. Needs no torch."""

from __future__ import annotations

import json
import sys
import time
from typing import Any, TextIO

from ps_feed.subscription import Subscription
from ps_runtime.credentials import PLAINTEXT, Access
from ps_runtime.quantities import counted, size_text
from ps_server.ops.columns import printable

LOOK_SECONDS = 1.0  # the state is printed this often, even without a new edition


def follow(
    server: str,
    job: str,
    access: Access = PLAINTEXT,
    wire: str = "float32",
    every: int = 1,
    as_json: bool = False,
    out: TextIO | None = None,
) -> None:
    """Writes a line for each edition, and one each second while an error keeps editions away. Ends with the job.

    Raises the errors of Subscription.wait after which waiting cannot help.
    """
    out = out or sys.stdout
    write = _json if as_json else _text
    last: object = None
    with Subscription(server, job, every=every, wire=wire, access=access) as feed:
        while True:
            feed.look(last, LOOK_SECONDS)
            edition, trouble, ended = feed.edition, feed.trouble, feed.ended
            if edition is not last or trouble is not None or ended:
                out.write(write(job, feed) + "\n")
                out.flush()
            last = edition
            if ended:
                return


def _known(job: str, feed: Subscription) -> dict[str, Any]:
    edition, received = feed.edition, feed.received
    return {
        "time": time.time(),
        "job": job,
        "run": "" if edition is None else edition.run,
        "version": feed.version,
        "behind": feed.behind,
        "age_seconds": None if edition is None else round(feed.age, 3),
        "restores": feed.restores,
        "received_bytes": received.nbytes,
        "element_bytes": received.elements,
        "trouble": None if feed.trouble is None else str(feed.trouble),
        "ended": feed.ended,
    }


def _json(job: str, feed: Subscription) -> str:
    return json.dumps(_known(job, feed))


def _text(job: str, feed: Subscription) -> str:
    known = _known(job, feed)
    if feed.edition is None:
        return printable(f"job {job}: no edition yet: {known['trouble']}")
    whole, received = known["element_bytes"], known["received_bytes"]
    parts = [
        f"version {known['version']}",
        f"{counted(known['behind'], 'update')} behind",
        f"{known['age_seconds']:.1f} s old",
        f"{size_text(received)} received" + (f", {size_text(whole)} if all came whole" if received < whole else ""),
    ]
    if known["restores"]:
        parts.append(f"rolled back {counted(known['restores'], 'time')}")
    if known["trouble"]:
        parts.append(known["trouble"])
    if known["ended"]:
        parts.append("the job has ended")
    return printable(f"job {job}: {'; '.join(parts)}")
