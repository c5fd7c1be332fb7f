"""The PS_* variables that some part of the project reads, and the word about those that nothing reads.

The two packages of servers and workers do not know each other's settings, and one environment serves both. So the names
stand here, and a test holds the list against the settings that both declare.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches

# What workers read, and their launcher.
_WORKERS = """
    PS_CONNECT_TIMEOUT PS_ELASTIC PS_FIRST_RANK PS_INSECURE PS_JOB PS_LOG_DIR PS_MAX_RESTARTS PS_METRICS_HOST
    PS_METRICS_INSECURE PS_METRICS_PORT PS_MODE PS_RANK PS_SERVER PS_SHARED_DIRECTORY PS_START_TIMEOUT
    PS_TAKE_OVER PS_TLS_CA PS_TLS_CERT PS_TLS_KEY PS_TOKEN_FILE PS_TRANSPORT PS_WORKERS PS_WORLD_SIZE
"""
# What the launcher tells its workers.
_LAUNCHED = """
    PS_LAUNCHED PS_LAUNCH_ID PS_LAUNCH_RANKS PS_LOCAL_RANK PS_RESTART_COUNT PS_STARTED_FILE
"""
# What servers read.
_SERVERS = """
    PS_ADVERTISE PS_APPLY_THREADS PS_CHECKPOINT_DIR PS_CHECKPOINT_EVERY PS_COORDINATOR PS_FAILPOINTS PS_HOST
    PS_INDEX PS_KEEP PS_LEASE PS_MAX_ALL_CALLS PS_MAX_BUCKETS PS_MAX_CALLER_BYTES PS_MAX_CALLS PS_MAX_CONNECTIONS
    PS_MAX_HANDSHAKE_SECONDS PS_MAX_JOBS PS_MAX_JOB_BYTES PS_MAX_LEASES PS_MAX_MESSAGE_BYTES PS_MAX_METADATA_BYTES
    PS_MAX_NAME_LENGTH PS_MAX_PARAMETERS PS_MAX_PUSH_NORM PS_MAX_ROUND_BYTES PS_MAX_SAMPLES PS_MAX_STAGED_BYTES
    PS_MAX_STALL_SECONDS PS_MAX_STATE_BYTES PS_MAX_UPLOAD_SECONDS PS_MAX_WORKERS PS_PORT PS_RESTORE PS_RESUME
    PS_SHARDS PS_TOKENS
"""
# What the compose files read.
_COMPOSE = """
    PS_GPUS PS_IMAGE PS_IMAGE_CUDA PS_PUBLISH_GRAFANA_PORT PS_PUBLISH_METRICS_PORT PS_PUBLISH_PORT
    PS_PUBLISH_PROMETHEUS_PORT PS_SERVER_MEMORY PS_SHARED_MEMORY PS_STEPS PS_TORCH PS_TORCH_CUDA
    PS_TORCH_CUDA_INDEX_URL PS_TORCH_INDEX_URL PS_WORKER_MEMORY PS_WORKER_THREADS
"""
KNOWN = frozenset(f"{_WORKERS} {_LAUNCHED} {_SERVERS} {_COMPOSE}".split())
_OF_OTHERS = frozenset({"PS_COLORS", "PS_FORMAT", "PS_PERSONALITY"})  # those of the program `ps`
# What Kubernetes sets for the ports of a Service whose name begins with ps.
_SERVICE_LINK = re.compile(r"PS_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")


def unknown_variables(environment: Mapping[str, str]) -> str | None:
    """One line about the PS_* variables that nothing reads, with the nearest known names; None if there are none."""
    found = [
        name
        for name, value in sorted(environment.items())
        if name.startswith("PS_") and name not in KNOWN | _OF_OTHERS and not _is_service_link(name, value)
    ]
    return "; ".join(map(_about, found)) or None


def _is_service_link(name: str, value: str) -> bool:
    return bool(_SERVICE_LINK.fullmatch(name)) or (name.endswith("_PORT") and "://" in value)


def _about(name: str) -> str:
    near = get_close_matches(name, sorted(KNOWN), 1)
    return f"the variable {name} is not known and has no effect" + (f", did you mean {near[0]}?" if near else "")
