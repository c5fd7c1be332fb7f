"""How models are trained, as `prepare` was told. Which job it is: ps_worker/cluster/participation.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ps_protocol.codecs import WIRE_FORMATS
from ps_protocol.errors import InvalidRequest
from ps_protocol.job import NonFinite


@dataclass(frozen=True)
class PrepareOptions:
    """How models are trained: what `prepare` was told.

    bucket_bytes: of a full bucket; None: what the job has, or the server chooses
    overlap:      whether full buckets leave while backward runs; None: once the script was seen to allow it
    ddp:          arguments for DistributedDataParallel
    """

    bucket_bytes: int | None = None
    non_finite: NonFinite = NonFinite.REFUSE
    gradient_wire: str = "float32"
    weight_wire: str = "float32"
    overlap: bool | None = None
    ddp: Mapping[str, Any] = field(default_factory=dict)


def non_finite_policy(name: str) -> NonFinite:
    """Returns the policy of that name. Raises InvalidRequest if there is none."""
    try:
        return NonFinite(name)
    except ValueError:
        raise InvalidRequest(f"non_finite must be 'refuse', 'skip' or 'allow', got {name!r}") from None


def wire_format(name: str) -> str:
    """Returns the name of a wire format. Raises InvalidRequest if it is none."""
    if name not in WIRE_FORMATS:
        raise InvalidRequest(f"a wire format is one of {', '.join(WIRE_FORMATS)}, got {name!r}")
    return name
