"""Drops jobs that a shard holds and no coordinator knows: a CreateJob may arrive after the DropJob that follows it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Mapping

from ps_protocol.errors import PSError
from ps_server.coordinator.job import RegisteredShard

log = logging.getLogger("ps_server")


def drop_strays(
    shards: Mapping[int, RegisteredShard], known: Callable[[], Collection[str]], registering: threading.Lock
) -> None:
    """Has the shards drop what nobody uses, and nobody would ever end.

    known:       the jobs that there are
    registering: held by who makes a job, until it is one of them
    """
    for index, shard in shards.items():
        with contextlib.suppress(PSError):  # it is asked again soon
            held = shard.client.jobs()
            if held <= set(known()):
                continue
            with registering:
                for name in sorted(held - set(known())):
                    shard.client.drop_job(name)
                    log.warning("job %s: shard %d held it still, and nobody else: dropped", name, index)
