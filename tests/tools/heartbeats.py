"""Heartbeats that come more often than by default: a test soon has what is told with them, or known by them."""

from __future__ import annotations

import pytest

from ps_server.core import membership
from ps_worker.cluster import own_membership
from ps_worker.cluster.own_membership import OwnMembership


def beat_often(monkeypatch: pytest.MonkeyPatch, beats: float) -> None:
    """Has sessions of this process send so many heartbeats in a lease.

    Each has as much time to be answered as by default: otherwise, where a busy machine answers late, none would be
    answered, and leases would end.
    """
    by_default = own_membership.HEARTBEATS_PER_LEASE
    monkeypatch.setattr(OwnMembership, "_pause", lambda _, seconds: seconds * by_default / beats)


def be_sure_soon(monkeypatch: pytest.MonkeyPatch, beats: float) -> None:
    """Has coordinators soon know who lives on, where so many heartbeats come in a lease.

    They count each as a sign of life of its own, and are sure of one that comes later than any that a network may have
    held up. Here none does.
    """
    monkeypatch.setattr(membership, "TOGETHER_PER_LEASE", 2 * beats)
    monkeypatch.setattr(membership, "DELAYED_PER_LEASE", 4 * beats)


def come_back_soon(monkeypatch: pytest.MonkeyPatch, beats: float) -> None:
    """Has a worker that was cut off soon learn that it has lost its place, and soon have another one.

    It waits for a heartbeat of another worker that is later than any that may have been under way. Servers take that
    to be a third of a lease otherwise.
    """
    beat_often(monkeypatch, beats)
    be_sure_soon(monkeypatch, beats)
    monkeypatch.setattr(membership, "HEARTBEATS_PER_LEASE", beats)
