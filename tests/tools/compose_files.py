"""The compose files as they stand, and who is who in them."""

from __future__ import annotations

import copy
import re
from functools import cache
from typing import Any

import yaml

from tests.tools.launching import ROOT

COMPOSE = "docker-compose.yml"
OVERLAYS = GPU, GRAFANA = ("docker-compose.gpu.yml", "docker-compose.grafana.yml")
SHARDS = ("shard-0", "shard-1")
SERVERS = ("coordinator", *SHARDS)
RELAY = "relay"
TABLES = ("clicks", "movielens")
WORKERS = ("worker", *TABLES, "rl-trainer")
READERS = ("serve", "rl-rollout")  # of a job's weights
PROBED = ("page", "serve", "rl-pool", RELAY)  # and servers
UNPROBED = (*WORKERS, "rl-rollout", "certs", "certs-renewal", "admin")
ALL_OURS = (*SERVERS, *PROBED, *UNPROBED)
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()


def read(name: str) -> Any:
    """A YAML file with every ${VARIABLE:-default} at its default."""
    return copy.deepcopy(_parsed(name))


@cache
def _parsed(name: str) -> Any:
    """A file is parsed once: PyYAML takes a quarter of a second for ours."""
    return yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (ROOT / name).read_text()))
