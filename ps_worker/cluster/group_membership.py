"""A group's membership in its job, on one of the group's members.

Every member sends heartbeats. The lease of the group runs out with the lease of its most silent member. A member's
heartbeat thread does not join again by itself, as that of a single process does. Otherwise a group with a member that
hangs would join again and again, and other workers would wait for it each time. The group joins again once all of its
members have met, in their training threads.
"""

from __future__ import annotations

from typing import Any

from ps_protocol.errors import Fenced
from ps_protocol.messages.workers import JoinResult, read_joined, write_joined
from ps_protocol.v1 import membership_pb2
from ps_worker.cluster.own_membership import OwnMembership
from ps_worker.group import Group, place_of_member


class GroupMembership(OwnMembership):
    """A group's membership, on one of its members.

    `join` and `renewed` are collective: all members call them, and the first one asks the coordinator.
    """

    def __init__(self, group: Group, *args: Any) -> None:
        super().__init__(*args)
        self._group = group

    def renewed(self, place: JoinResult, cause: BaseException | None) -> JoinResult:
        """Joins again after a place is lost, with all members; returns the new place. Raises the first member's
        error.
        """
        with self._changed:
            self.lost = place  # answers about the old place are ignored from now on
        taken = self._take(place.identity.run, place)
        with self._changed:
            self.place = taken
            self._changed.notify_all()
            watching = self._watching
        if watching is not None:
            watching.stop()
        return taken

    def close(self, *given: Any, **more: Any) -> None:
        """Leaves the job and the group, as OwnMembership.close."""
        try:
            super().close(*given, **more)
        finally:
            self._group.neighbours.leave()

    def _first_place(self, run: str) -> JoinResult:
        return self._take(run, None)

    def _take(self, run: str, before: JoinResult | None) -> JoinResult:
        """Joins on the first member; returns the place on every member."""
        answer = self._group.from_first(lambda: write_joined(self._ask(run, before)).SerializeToString())
        return place_of_member(read_joined(membership_pb2.JoinResponse.FromString(answer)), self._group)

    def _join_again(self, lost: JoinResult) -> None:
        """Records that a place is lost, and aborts its calls. Calls of the next place go on: the training thread may
        have taken it before this answer came.
        """
        with self._changed:
            if self.holds(lost):
                self.lost = lost
                self._changed.notify_all()
        self._cut_off(lost)

    def _pause(self, seconds: float) -> float:
        """Returns the seconds between two heartbeats. With each of them this member looks for signs of the others."""
        return min(seconds, self._group.neighbours.pause or seconds)

    def _is_held(self) -> None:
        self._group.neighbours.all_go_on()

    def _beat_once(self, timeout: float) -> None:
        self._group.say_if_waiting()
        self._group.neighbours.check()
        super()._beat_once(timeout)

    def _is_for_good(self, error: BaseException) -> bool:
        """Whether an error ends this worker's part. Fenced does not, on other members: the first member may have joined
        again, which fences the old incarnation.
        """
        return self._group.member == 0 or not isinstance(error, Fenced)
