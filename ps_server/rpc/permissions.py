"""What each role may call: one table of every method, and principals as values.

A principal has permissions, each a role for every job or for one. A method names the roles that may call it; a method
that is not in the table is refused to all.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ps_protocol.errors import Forbidden, InvalidRequest


class Role(enum.Enum):
    """worker: trains. reader: looks. admin: also ends jobs. cluster: shards and the coordinator among themselves."""

    WORKER = "worker"
    READER = "reader"
    ADMIN = "admin"
    CLUSTER = "cluster"


Roles = frozenset[Role]

EVERYONE: Roles = frozenset()  # the caller is not asked who it is: probes cannot say
_WORKERS: Roles = frozenset({Role.WORKER})
_LOOKING: Roles = frozenset({Role.READER, Role.ADMIN, Role.CLUSTER})
_CLUSTER: Roles = frozenset({Role.CLUSTER})

_V1 = "/ps_protocol.v1."
METHODS: dict[str, Roles] = {
    _V1 + "DataService/Push": _WORKERS,
    _V1 + "DataService/Pull": _WORKERS | {Role.READER},
    _V1 + "DataService/PullState": _WORKERS,
    _V1 + "DataService/AttachSegment": _WORKERS,
    _V1 + "DataService/PushShared": _WORKERS,
    _V1 + "DataService/PullShared": _WORKERS,
    _V1 + "DataService/PushPullShared": _WORKERS,
    _V1 + "JobService/RegisterJob": _WORKERS,
    _V1 + "JobService/JoinJob": _WORKERS,
    _V1 + "JobService/WatchJob": _WORKERS | _LOOKING,
    _V1 + "JobService/Heartbeat": _WORKERS,
    _V1 + "JobService/LeaveJob": _WORKERS,
    _V1 + "JobService/EndJob": frozenset({Role.ADMIN}),
    _V1 + "JobService/SaveWorkerState": _WORKERS,
    _V1 + "JobService/CheckpointJob": frozenset({Role.ADMIN, Role.CLUSTER}),
    _V1 + "JobService/LeaseData": _WORKERS,
    _V1 + "JobService/ExchangeValues": _WORKERS,
    _V1 + "ClusterService/RegisterShard": _CLUSTER,
    _V1 + "ClusterService/GetStatus": _LOOKING,
    _V1 + "ShardService/CreateJob": _CLUSTER,
    _V1 + "ShardService/DropJob": _CLUSTER,
    _V1 + "ShardService/AdmitWorker": _CLUSTER,
    _V1 + "ShardService/RetireWorker": _CLUSTER,
    _V1 + "ShardService/BeginCheckpoint": _CLUSTER,
    _V1 + "ShardService/AwaitCheckpoint": _CLUSTER,
    _V1 + "ShardService/RestoreJob": _CLUSTER,
    _V1 + "ShardService/GetCommittedData": _CLUSTER,
    _V1 + "ShardService/GetShardStatus": _LOOKING,
    "/grpc.health.v1.Health/Check": EVERYONE,
    "/grpc.health.v1.Health/Watch": _LOOKING,
    "/grpc.health.v1.Health/List": _LOOKING,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _LOOKING,
}


@dataclass(frozen=True)
class Permission:
    """A role, for one job or (None) for all."""

    role: Role
    job: str | None = None


@dataclass(frozen=True)
class Principal:
    """A caller, by a name that may be logged, and what it may do."""

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
    """Returns what `ROLE` or `ROLE:JOB` permits.

    Raises InvalidRequest saying where the text stands; not what it is, which may be a misplaced secret.
    """
    name, colon, job = text.partition(":")
    role = next((role for role in Role if role.value == name), None)
    if role is None or (colon and not job):
        raise InvalidRequest(f"{where}: expected ROLE or ROLE:JOB with a role out of worker, reader, admin and cluster")
    if job and role is not Role.WORKER and role is not Role.READER:
        raise InvalidRequest(f"{where}: {name} is for all jobs; only worker and reader can be for one")
    return Permission(role, job or None)
