"""Reads a job's weights while it trains, in a process that takes no part in it. Needs no torch.

edition.py       An edition: an unchanging copy of a job's weights, put together from what shards send
mapping.py       Memory of an edition that a relay on this host shares
edition_client.py The gRPC calls that fetch editions from shards
pace.py          Chooses the next edition to request: how many updates ahead of the job, and whether as changes
edition_file.py  An edition as a safetensors file, made of views of its memory
telling.py       The reports that a relay sends to the servers that it follows
subscription.py  Follows a job: the newest edition, in memory
subscribing.py   `subscribe`, for scripts: follows a job by arguments and PS_* variables
"""

from typing import TYPE_CHECKING, Any

import ps_runtime  # noqa: F401  # sets what grpc reads when it is imported

__all__ = ["subscribe"]

if TYPE_CHECKING:
    from ps_feed.subscribing import subscribe
else:

    def __getattr__(name: str) -> Any:
        """Returns `subscribe`, which is imported when it is asked for: servers import this package, too."""
        if name == "subscribe":
            from ps_feed.subscribing import subscribe

            return subscribe
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
