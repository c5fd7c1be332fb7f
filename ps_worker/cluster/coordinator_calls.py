"""Calls to the coordinator."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc

from ps_protocol.addresses import is_host
from ps_protocol.batches import BatchLease, LeaseRequest
from ps_protocol.convert import data_ranges, identity_message, job_spec_message, worker_figures_message
from ps_protocol.errors import Backlogged, JobFinished, NotFound, PSError, UnknownWorker
from ps_protocol.figures import WorkerFigures
from ps_protocol.identity import Identity
from ps_protocol.job import JobSpec
from ps_protocol.messages import workers
from ps_protocol.messages.workers import GatherRequest, HeartbeatAnswer, JoinRequest, JoinResult, SavedState, ValueNews
from ps_protocol.v1 import jobs_pb2, membership_pb2
from ps_protocol.v1.jobs_pb2_grpc import JobServiceStub
from ps_protocol.v1.leases_pb2_grpc import DataLeaseServiceStub
from ps_protocol.v1.membership_pb2_grpc import MembershipServiceStub
from ps_protocol.v1.rounds_pb2_grpc import RoundServiceStub
from ps_protocol.versions import VERSION, check_server_version
from ps_runtime.channel import ChannelClosed, open_channel
from ps_runtime.credentials import PLAINTEXT, Access
from ps_runtime.grpc_status import error_from
from ps_runtime.retry import Peer, Retry
from ps_worker.cluster.options import JobOptions
from ps_worker.values import Registration, Roster

log = logging.getLogger("ps_worker")

CALL_SECONDS = 15.0
ROUND_SECONDS = 30.0  # longer than the coordinator keeps a caller waiting before it has it ask again
LEAVE_PAUSE_SECONDS = 0.5
# How long a worker that has something to leave tries to. A coordinator that is started again takes a few seconds, and
# `ps-worker run` kills a worker 15 s after SIGTERM.
LEAVE_SECONDS = 5.0
GIVEN_UP_SECONDS = 60.0  # for so long after a farewell was given up, the next ones are tried once, for LEAVE_SECONDS
# How a server, or gRPC itself, ends a call whose request is past a limit, or does not arrive in time. A server that
# stops cancels calls, too.
_TOO_LARGE = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED}
# The worker's part in the job has ended already.
_OVER = (NotFound, UnknownWorker, JobFinished)


class RosterWatch:
    """An iterator over the roster's changes, for one thread. It ends with the job, with the connection, or after
    `stop`.

    error: the text of the error with which it ended; empty: none
    """

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._call: Any = None
        self.error = ""
        with contextlib.suppress(ChannelClosed):
            self._call = ask()

    def __iter__(self) -> Iterator[Roster]:
        try:
            for response in self._call or ():
                asked = (response.script_rank, response.script_request) if response.script_request else None
                yield Roster(tuple(response.ranks), response.world_size, response.started, asked)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:  # `stop` cancels the call
                self.error = str(error.details())

    def stop(self) -> None:
        """Cancels the call. For any thread; may be called more than once."""
        if self._call is not None:
            self._call.cancel()


class Patience:
    """The time that a process spends on farewells that the coordinator does not answer. Jobs that are left one after
    the other may share it: it is spent once then, and a farewell after that is tried once and has less time."""

    def __init__(self) -> None:
        self._given_up_at = -math.inf

    @property
    def is_over(self) -> bool:
        """Whether a farewell was given up a short time ago."""
        return time.monotonic() < self._given_up_at + GIVEN_UP_SECONDS

    def end(self) -> None:
        """Records that a farewell is given up."""
        self._given_up_at = time.monotonic()


class CoordinatorClient:
    """The calls of a worker to the coordinator. Methods block, retry until `closing` is set, and raise PSError.

    figures: returns the worker's measurements, which heartbeats carry for dashboards; None if they carry none
    """

    def __init__(
        self,
        address: str,
        timeout: float,
        access: Access = PLAINTEXT,
        figures: Callable[[], WorkerFigures] | None = None,
    ) -> None:
        self.address = address
        self.closing = threading.Event()
        self.patience = Patience()
        self._timeout, self._figures = timeout, figures
        self._attempt_seconds = min(CALL_SECONDS, timeout / 2)  # one answer that is slow is not the end
        self._peer = Peer("coordinator", address, access)
        self._channel = open_channel(address, access, reads_itself=True)  # a watch lasts as long as the job
        self._jobs = JobServiceStub(self._channel)
        self._membership = MembershipServiceStub(self._channel)
        self._data_leases = DataLeaseServiceStub(self._channel)
        self._rounds = RoundServiceStub(self._channel)

    def register(self, spec: JobSpec, launch: str = "", memory_place: str = "") -> Registration:
        """Registers a job, or finds an equal one. Raises VersionMismatch if the servers are too old.

        launch:       this worker's launch. JobFinished is raised if the launch took part in the job, and the job has
                      finished; empty: a finished job may begin anew
        memory_place: names the memory that this worker can share with shards; empty: none
        """
        request = jobs_pb2.RegisterJobRequest(
            spec=job_spec_message(spec), protocol_version=VERSION, launch=launch, memory_place=memory_place
        )
        response = self._call(self._jobs.RegisterJob, request)
        check_server_version(response.protocol_version)
        shards = workers.shard_map(response.shard_map)
        return Registration(shards, response.bucket_bytes, response.run, response.stage_limit)

    def join(
        self, options: JobOptions, run: str, metrics_address: str, before: JoinResult | None, clock: int
    ) -> JoinResult:
        """Makes this process a live worker of a run of the job.

        before, clock: the worker's last place, and the steps that it had finished there; None and 0 for a new worker

        Raises JobInUse if live workers of another launch prevent it. While the coordinator cannot tell whether these
        are live, it waits until the end of their leases, even beyond the timeout.
        """
        # One number for all repeats: the coordinator recognises them as one request, however late one arrives.
        attempt, since, launch = secrets.randbits(63), math.inf, options.launch
        rank, previous = options.rank, None
        if before is not None:
            rank, previous = before.identity.rank, before.identity.incarnation
        request = JoinRequest(
            os.getpid(),
            socket.gethostname(),
            metrics_address,
            previous,
            clock,
            attempt,
            launch.name,
            launch.take_over,
            launch_ranks=launch.ranks,
            run=run,
        )

        def ask() -> Any:
            nonlocal since
            waited = max(0.0, time.monotonic() - since)
            message = workers.write_join(options.job, rank, replace(request, waited=waited))
            try:
                return self._membership.Join(message, timeout=self._attempt_seconds)
            except grpc.RpcError as error:
                # The coordinator knows of this request, and of the workers in the way.
                if error_from(error, str(self._peer)).retry_after is not None:
                    since = min(since, time.monotonic())
                raise

        return workers.read_joined(Retry(self._peer, self._timeout, self.closing).call(ask))

    def heartbeat(self, worker: Identity, clock: int, timeout: float, script_wanted: bool = False) -> HeartbeatAnswer:
        """Renews the lease, without retries. Sends the worker's measurements too.

        script_wanted: ask for the settings of the job's script
        """
        request = workers.write_heartbeat(worker, clock, script_wanted)
        # Where the first member of a group runs is known from its join. A coordinator refuses other texts than names.
        if worker.member and is_host(host := socket.gethostname()):
            request.host, request.pid = host, os.getpid()
        if self._figures is not None:
            request.figures.CopyFrom(worker_figures_message(self._figures()))
        try:
            answer = self._membership.Heartbeat(request, timeout=timeout)
        except grpc.RpcError as error:
            raise error_from(error, str(self._peer)) from None
        return workers.read_heartbeat_answer(answer)

    def save_state(self, worker: Identity, clock: int, state: bytes) -> None:
        """Sends a worker's own state for a checkpoint."""
        saved = membership_pb2.WorkerState(clock=clock, content=state)
        request = membership_pb2.SaveWorkerStateRequest(worker=identity_message(worker), state=saved)
        self._call(self._membership.SaveWorkerState, request)

    def tell_script(self, worker: Identity, request: int, script: SavedState | None) -> None:
        """Answers the coordinator's request number `request` with the settings of this worker's script.

        It does not retry: the coordinator asks again. script: None: there are none
        """
        message = membership_pb2.SaveWorkerStateRequest(
            worker=identity_message(worker), script=workers.state_message(script), script_request=request
        )
        try:
            self._membership.SaveWorkerState(message, timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            raise error_from(error, str(self._peer)) from None

    def lease_batches(self, worker: Identity, ask: LeaseRequest) -> BatchLease:
        """Leases batches of a loader's data."""
        response = self._call(self._data_leases.LeaseData, workers.write_lease_request(worker, ask))
        return BatchLease(data_ranges(response.ranges), response.complete)

    def exchange(
        self, worker: Identity, number: int, clock: int, value: bytes, heard: Callable[[ValueNews], bool]
    ) -> ValueNews | None:
        """Gives a value to a round, waits for the round, and returns it with all values.

        number: the round's number; 0: give no value, and ask only which round is next
        heard:  is called with each message while the round is open; if it returns False, the call ends and returns None
        """
        retry = Retry(self._peer, self._timeout, self.closing)
        request = workers.write_gather(GatherRequest(worker, number, clock, value))
        while True:
            values: dict[int, bytes] = {}
            try:
                call = self._rounds.GatherValues(request, timeout=ROUND_SECONDS)
                for message in call:
                    retry.progressed()
                    news = workers.read_round_news(message)
                    values |= news.values
                    if news.complete and news.number == number:
                        return replace(news, values=values)
                    if not news.complete and not news.values and not heard(news):
                        call.cancel()
                        return None
            except grpc.RpcError as error:
                retry.failed(error)

    def leave(
        self,
        worker: Identity,
        state: SavedState | None = None,
        done: bool = False,
        script: SavedState | None = None,
    ) -> None:
        """Leaves the job, and sends this worker's own state for a successor. Without the call the worker is removed at
        the end of its lease: it leaves no state then, and counts as lost, so that the job does not end with it.

        done:   the script has ended
        script: the script's settings for the job
        If the state is too large for a message, or takes longer than CALL_SECONDS to send, it tries once more without
        the state. With `done` or a state it tries again for LEAVE_SECONDS where the coordinator does not answer. Once
        `patience` is over it tries once, and waits for LEAVE_SECONDS instead of CALL_SECONDS.
        """
        request = membership_pb2.LeaveRequest(
            worker=identity_message(worker), done=done, script=workers.state_message(script)
        )
        if state is not None:
            request.state.clock, request.state.content = state.clock, state.content
        if self._figures is not None:
            request.figures.CopyFrom(worker_figures_message(self._figures()))
        is_over = self.patience.is_over
        repeats = (done or state is not None) and not is_over
        until = time.monotonic() + (LEAVE_SECONDS if repeats else 0.0)
        timeout = LEAVE_SECONDS if is_over else CALL_SECONDS
        was_cancelled = False
        while True:
            try:
                self._membership.Leave(request, timeout=timeout)
                return
            except grpc.RpcError as error:
                failed, code = error_from(error, str(self._peer)), error.code()
                is_too_large = code in _TOO_LARGE and not isinstance(failed, Backlogged)
                if is_too_large and code is grpc.StatusCode.CANCELLED and not was_cancelled and repeats:
                    was_cancelled = True  # perhaps by a server that stops
                    time.sleep(LEAVE_PAUSE_SECONDS)
                elif is_too_large and request.HasField("state"):
                    log.warning("this worker leaves without its state at clock %d: %s", request.state.clock, failed)
                    request.ClearField("state")
                elif isinstance(failed, _OVER):
                    return  # the job has ended, or another process has the rank
                elif failed.retryable and time.monotonic() < until:
                    time.sleep(LEAVE_PAUSE_SECONDS)
                elif repeats and timeout == CALL_SECONDS and code is grpc.StatusCode.DEADLINE_EXCEEDED:
                    # The answer waits for the job's last checkpoint. If the call was heard, it is now answered at once.
                    # Or the link is too slow for the state: it goes without it now, so that this worker is not lost.
                    timeout = LEAVE_SECONDS
                    if request.HasField("state"):
                        log.warning(
                            "this worker leaves without its state at clock %d, unless the coordinator has it from a "
                            "call that it did not answer in %g s",
                            *(request.state.clock, CALL_SECONDS),
                        )
                        request.ClearField("state")
                else:
                    self._not_told(request, failed, repeats)
                    return

    def _not_told(self, request: membership_pb2.LeaveRequest, error: PSError, repeats: bool) -> None:
        """Logs that a farewell was given up. repeats: it was tried again before"""
        if repeats and error.retryable:
            self.patience.end()
        log.warning(
            "the coordinator could not be told that this worker leaves%s: it counts as lost when its lease ends (%s)",
            " with its state" if request.HasField("state") else "",
            error,
        )

    def watch(self, job: str) -> RosterWatch:
        """Watches the roster. The iterator first yields the current roster, then each change."""
        return RosterWatch(lambda: self._membership.Watch(membership_pb2.WatchRequest(job=job)))

    def close(self) -> None:
        """Closes the connection; calls in flight end."""
        self.closing.set()
        self._channel.close()

    def _call(self, method: Callable[..., Any], request: Any) -> Any:
        retry = Retry(self._peer, self._timeout, self.closing)
        return retry.call(lambda: method(request, timeout=self._attempt_seconds))
