"""What tests of several files here follow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tools.cluster import Cluster
from tests.tools.followed_trainer import FollowedTrainer


@pytest.fixture
def trainer(shared: Cluster, job: str) -> Iterator[FollowedTrainer]:
    with shared.connect("sync", job=job) as session:
        yield FollowedTrainer(session)
