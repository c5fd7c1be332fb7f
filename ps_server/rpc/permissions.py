"""Permissions: one table of every method, by service, with the roles that may call it; and principals.

A principal has permissions, each a role for every job or for one. A method names the roles that may call it; a method
that is not in the table is refused to all.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from ps_protocol.errors import Forbidden, InvalidRequest
from ps_protocol.v1 import (
    cluster_pb2,
    data_pb2,
    feed_pb2,
    jobs_pb2,
    leases_pb2,
    membership_pb2,
    rounds_pb2,
    shard_pb2,
)


class Role(enum.Enum):
    """The roles. worker: trains; reader: reads; admin: also ends jobs; cluster: shards and the coordinator to each
    other.
    """

    WORKER = "worker"
    READER = "reader"
    ADMIN = "admin"
    CLUSTER = "cluster"


Roles = frozenset[Role]

EVERYONE: Roles = frozenset()  # the caller need not be known: probes send no credentials
_WORKERS: Roles = frozenset({Role.WORKER})
_LOOKING: Roles = frozenset({Role.READER, Role.ADMIN, Role.CLUSTER})
_CLUSTER: Roles = frozenset({Role.CLUSTER})

_ADMIN: Roles = frozenset({Role.ADMIN})

# A launcher has its workers' role. That adds no power: a caller that may join a job may take any rank of it.
_MEMBERSHIP = {"Watch": _WORKERS | _LOOKING, "ReportWorkerEnd": _WORKERS | _ADMIN | _CLUSTER}
_STATUS = {"GetStatus": _LOOKING, "WatchStatus": _LOOKING, "ReportShardEnd": _CLUSTER | _ADMIN}


def _service(module: Any, name: str, roles: Roles, **exceptions: Roles) -> dict[str, Roles]:
    """Returns the roles that may call each method of a service: `roles`, except for the methods in `exceptions`."""
    service = module.DESCRIPTOR.services_by_name[name]
    return {f"/{service.full_name}/{method.name}": exceptions.get(method.name, roles) for method in service.methods}


# The name that newer clients ask for first. Its messages are those of v1alpha, byte for byte.
REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"

METHODS: dict[str, Roles] = {
    **_service(data_pb2, "DataService", _WORKERS, Pull=_WORKERS | {Role.READER}, PullRows=_WORKERS | {Role.READER}),
    **_service(feed_pb2, "FeedService", _WORKERS | _LOOKING),
    **_service(jobs_pb2, "JobService", _ADMIN, RegisterJob=_WORKERS, CheckpointJob=_ADMIN | _CLUSTER),
    **_service(membership_pb2, "MembershipService", _WORKERS, **_MEMBERSHIP),
    **_service(leases_pb2, "DataLeaseService", _WORKERS),
    **_service(rounds_pb2, "RoundService", _WORKERS),
    **_service(cluster_pb2, "ClusterService", _CLUSTER, **_STATUS),
    **_service(shard_pb2, "ShardService", _CLUSTER, GetShardStatus=_LOOKING),
    **_service(health_pb2, "Health", _LOOKING, Check=EVERYONE),
    **_service(reflection_pb2, "ServerReflection", _LOOKING),
    f"/{REFLECTION_V1}/ServerReflectionInfo": _LOOKING,
}


@dataclass(frozen=True)
class Permission:
    """A role, for one job or (None) for all."""

    role: Role
    job: str | None = None


@dataclass(frozen=True)
class Principal:
    """A caller: a name for logs, and its permissions."""

    name: str
    permissions: frozenset[Permission]

    def check(self, method: str, job: str | None = None) -> None:
        """Raises Forbidden unless this caller may call the method; with a job, unless it may for that job."""
        allowed = METHODS.get(method)
        if allowed is None:
            raise Forbidden(f"{method} is not in the table of roles")
        if allowed == EVERYONE:
            return
        fitting = [permission for permission in self.permissions if permission.role in allowed]
        if not fitting:
            names = " or ".join(sorted(role.value for role in allowed))
            raise Forbidden(f"{self.name} may not call {method.rpartition('/')[2]}: that takes the role {names}")
        if job is not None and not any(permission.job in (None, job) for permission in fitting):
            own = ", ".join(sorted({str(permission.job) for permission in fitting}))
            raise Forbidden(f"{self.name} may call {method.rpartition('/')[2]} for job {own} only")


ALL_PERMISSIONS = frozenset(Permission(role) for role in Role)


def parse_permission(text: str, where: str) -> Permission:
    """Parses `ROLE` or `ROLE:JOB`.

    Raises InvalidRequest that names the position of the text, and not the text: it may be a misplaced secret.
    """
    name, colon, job = text.partition(":")
    role = next((role for role in Role if role.value == name), None)
    if role is None or (colon and not job):
        raise InvalidRequest(f"{where}: expected ROLE or ROLE:JOB with a role out of worker, reader, admin and cluster")
    if job and role is not Role.WORKER and role is not Role.READER:
        raise InvalidRequest(f"{where}: {name} is for all jobs; only worker and reader can be for one")
    return Permission(role, job or None)
