"""Clusters that are broken on purpose: each mutation takes one rule, or one repair, out of the real code.

A simulation that finds nothing wrong says something only if it finds these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from ps_server.core.consistency import ADMITTED, UpdateRule
from ps_server.core.membership import Membership, Rivals
from ps_server.core.partition import JobPartition
from ps_server.shard.job import HostedJob
from tests.simulation.cluster import Cluster

Break = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutation:
    """One thing that is broken.

    modes: in which it is looked for
    kinds: of promises that it breaks, any of which will do
    """

    breaks: Break
    modes: tuple[str, ...]
    kinds: frozenset[str]

    @property
    def name(self) -> str:
        """What it is called."""
        return self.breaks.__name__

    def find(self, patch: pytest.MonkeyPatch, seeds: range) -> tuple[str, int, str] | None:
        """Returns the first mode and seed that find it, and the kind of promise that is broken; None: none does."""
        self.breaks(patch)
        for seed in seeds:
            for mode in self.modes:
                kinds = {violation.kind for violation in Cluster(mode, seed).run()} & self.kinds
                if kinds:
                    return mode, seed, min(kinds)
        return None


# -- rules of the core -----------------------------------------------------------------------------------------------


def takes_repeats_for_new(patch: pytest.MonkeyPatch) -> None:
    """A push that comes twice counts twice."""
    patch.setattr(UpdateRule, "is_repeat", lambda self, rank, clock: False)


def acknowledges_and_forgets(patch: pytest.MonkeyPatch) -> None:
    """Some pushes are acknowledged and never applied."""
    stage = UpdateRule.stage

    def forgetful(self: UpdateRule[object], rank: int, clock: int, *rest: object) -> None:
        stage(self, rank, clock, *rest)  # type: ignore[arg-type]
        if clock % 7 == 0:
            del self.waiting[rank]

    patch.setattr(UpdateRule, "stage", forgetful)


def admits_everybody(patch: pytest.MonkeyPatch) -> None:
    """No pull waits for anybody."""
    patch.setattr(UpdateRule, "admits", lambda self, rank, clock: ADMITTED)


def fences_nobody(patch: pytest.MonkeyPatch) -> None:
    """Workers that were replaced, or whose lease ran out, may push and pull."""
    patch.setattr(JobPartition, "check_worker", lambda self, rank, incarnation, key=None: None)


def never_removes(patch: pytest.MonkeyPatch) -> None:
    """A shard goes on counting the dead."""
    patch.setattr(JobPartition, "_remove_worker", lambda self, command: None)


def refuses_launches_at_once(patch: pytest.MonkeyPatch) -> None:
    """A launch is refused although those in its way may be dead."""
    rivals = Membership.rivals

    def at_once(self: Membership, *arguments: Any) -> Rivals | None:
        found = rivals(self, *arguments)
        return found and replace(found, live=True)

    patch.setattr(Membership, "rivals", at_once)


def mixes_runs(patch: pytest.MonkeyPatch) -> None:
    """A shard takes calls of any run of a job."""
    patch.setattr(HostedJob, "check_run", lambda self, run: None)


RULES = (
    Mutation(takes_repeats_for_new, ("async",), frozenset({"doubled"})),
    Mutation(acknowledges_and_forgets, ("async",), frozenset({"lost", "own update missing", "stuck"})),
    Mutation(admits_everybody, ("ssp:0",), frozenset({"too stale", "own update missing"})),
    Mutation(admits_everybody, ("sync",), frozenset({"wrong update", "own update missing"})),
    Mutation(fences_nobody, ("sync",), frozenset({"wrong update", "gave up", "stuck", "lost", "doubled"})),
    Mutation(never_removes, ("ssp:0",), frozenset({"stuck", "waits for the dead", "wrong roster"})),
    Mutation(refuses_launches_at_once, ("async",), frozenset({"gave up"})),
)

# -- repairs: what was broken once -----------------------------------------------------------------------------------

REPAIRS: tuple[Mutation, ...] = ()
