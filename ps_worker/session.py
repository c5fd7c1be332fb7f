"""The public face of a worker: `connect`, and the session that it returns.

connect    The settings become a WorkerConfig, and an earlier session in the same place is closed. The mode decides on
           the strategy, which is all that this file knows of how a worker trains.
prepare    Models, optimizers, loaders and schedulers are sorted and handed to the strategy.
train      The script runs its own loop, with the things that `prepare` returned. The session answers with its rank
           and clock, with values over all workers, and with `no_sync`.
close      The worker leaves the job: when the script says so, at its end, or at SIGTERM.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing.util
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ps_protocol.errors import InvalidRequest
from ps_runtime.compiled_loops import c_compiler, loops_folder
from ps_runtime.credentials import is_loopback, require_encryption
from ps_runtime.own_address import own_address
from ps_worker.by_mode import STRATEGIES
from ps_worker.config import WorkerConfig, check, resolve
from ps_worker.given import check_own, check_pairs, non_finite_named, sort_given, wire_named
from ps_worker.launched import report_errors_in_one_line, speak_as, warn_of_unknown_variables
from ps_worker.metrics import WorkerMetrics
from ps_worker.model.local_settings import local_settings
from ps_worker.model.no_sync import lend
from ps_worker.model.weights import with_values
from ps_worker.prepared import Prepared
from ps_worker.state.ending import end_by_signal, is_cut_short
from ps_worker.strategies.collectives import Collectives
from ps_worker.tables.native_loops import loops_for
from ps_worker.timeline.recording import Timeline, Wanted
from ps_worker.values import PrepareOptions

log = logging.getLogger("ps_worker")

_open: list[Session] = []  # sessions of this process that are not closed
_opening = threading.Lock()


def connect(
    server: str | None = None,
    mode: str | None = None,
    job: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    elastic: bool | None = None,
    quorum: str | int | None = None,
    quorum_grace: float | None = None,
    connect_timeout: float | None = None,
    metrics_host: str | None = None,
    metrics_port: int | None = None,
    transport: str | None = None,
    shared_directory: str | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    tls_ca: str | None = None,
    token_file: str | None = None,
    insecure: bool | None = None,
    metrics_insecure: bool | None = None,
    take_over: bool | None = None,
    timeline: str | None = None,
    timeline_first: int | None = None,
    timeline_steps: int | None = None,
) -> Session:
    """Makes a worker's session. It talks to no server before `prepare`.

    What is not given comes from PS_* variables, then from a launcher's variables, then from defaults.

    server:          HOST:PORT of the coordinator (PS_SERVER)
    mode:            single, ddp, sync, ssp:K, async or local:H (PS_MODE); by default sync with a server, otherwise
                     ddp under a launcher of several processes, otherwise single
    job:             the job's name (PS_JOB), "default"
    rank:            from 0 (PS_RANK, or the launcher's: torchrun, srun, mpirun, an Indexed Job of Kubernetes)
    world_size:      how many workers the job has (PS_WORLD_SIZE, or the launcher's)
    elastic:         no fixed world size; ranks are given out, workers come and go (PS_ELASTIC)
    quorum:          in sync, how many live workers an update waits for (PS_QUORUM): 3, or "all-1" for all but one; a
                     gradient that comes later counts in the next update. By default all
    quorum_grace:    seconds that an update then still waits for the others (PS_QUORUM_GRACE), 0
    connect_timeout: seconds to keep trying servers that do not answer (PS_CONNECT_TIMEOUT), 60
    metrics_host, metrics_port: where to serve /metrics (PS_METRICS_HOST, PS_METRICS_PORT); any free port
    transport:       how buckets travel (PS_TRANSPORT): "shm", through memory shared with shards on this host; "tcp",
                     over data connections; "grpc"; "auto", to each shard by the first of these that can be had
    shared_directory: where shards take that memory over, the same as theirs (PS_SHARED_DIRECTORY), /dev/shm
    tls_ca:          file of the CA that servers are verified by (PS_TLS_CA); without it they are called in plaintext
    tls_cert, tls_key: this worker's own certificate and its key (PS_TLS_CERT, PS_TLS_KEY), where servers ask for one
    token_file:      file with this worker's bearer token (PS_TOKEN_FILE), where servers ask for one
    insecure:        a token may leave this machine in plaintext, and metrics may be served so (PS_INSECURE)
    metrics_insecure: metrics may be served beyond this machine without TLS (PS_METRICS_INSECURE)
    take_over:       replace live workers of another launch that train the job (PS_TAKE_OVER); by default `prepare`
                     raises JobInUse, which names them
    timeline:        record from the first step on when each bucket travels (PS_TIMELINE): this worker's rank goes into
                     the file's name, trace.json becomes trace-rank0.json; see `Session.timeline`
    timeline_first, timeline_steps: the first step that is recorded, 1, and how many are, 50 (PS_TIMELINE_FIRST,
                     PS_TIMELINE_STEPS)

    An open session of this process with the same server, job, rank and launch is closed first, prepared or not, so that
    a notebook's cell can be run again. An elastic session has no rank and stays open.

    Raises InvalidRequest for settings that contradict each other, and for files that do not fit together.
    """
    arguments = dict(locals())  # nothing but the parameters yet: each is a setting of its name
    report_errors_in_one_line()
    config = resolve(**arguments)
    speak_as(config.job, config.rank, config.log_level, config.log_format)
    warn_of_unknown_variables()
    _close_earlier(config)
    return Session(config)


class Session:
    """One worker's part in one job, from `connect` to `close`; also a context manager.

    mode:            single, ddp, sync, ssp:K, async or local:H
    device:          where models and batches go: a GPU of this worker's own if torch sees one, otherwise the CPU
    metrics_address: HOST:PORT at which this worker serves /metrics
    """

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._pid = os.getpid()
        self._models: list[nn.Module] = []  # the script's own, from `prepare` on
        self._take_back: list[Callable[[], None]] = []  # of each model's `no_sync`
        self._prepared, self._options = Prepared(), PrepareOptions()
        self._has_loaders = False  # that `prepare` returned
        self.mode = config.mode
        self.device = _device(config.local_rank)
        self._metrics = WorkerMetrics()
        _serve_metrics(self._metrics, config)
        self.metrics_address = self._metrics.address
        self._timeline = Timeline()
        self._strategy = STRATEGIES[config.mode.partition(":")[0]](config, self._metrics, self.device, self._timeline)
        if config.timeline is not None:
            self._record(Wanted(config.timeline, config.timeline_first, config.timeline_steps))
        _close_at_exit(self)
        with _opening:
            _open.append(self)

    def __repr__(self) -> str:
        config = self._config
        job = "" if config.consistency is None else f" job={config.job!r} server={config.server!r}"
        place = f"mode={self.mode!r} rank={self.rank} world_size={self.world_size}"
        return f"<Session {place}{job} clock={self.clock}>"

    @property
    def rank(self) -> int:
        """This worker's rank. In an elastic job it is known once `prepare` has joined."""
        return self._strategy.rank

    @property
    def local_rank(self) -> int:
        """This worker's number among those of its host, from 0, as its launcher says."""
        return self._config.local_rank

    @property
    def world_size(self) -> int:
        """How many workers take part: declared, or live now in an elastic job."""
        return self._strategy.world_size

    @property
    def clock(self) -> int:
        """How many steps this worker has finished, counted from the job's beginning.

        With several optimizers each step of each counts. If the job is rolled back to a checkpoint, so is the clock. In
        local:Ts workers make unlike numbers of steps, and the clock is this worker's own: see `round`.
        """
        return self._strategy.clock

    @property
    def round(self) -> int:
        """How many updates of the weights this worker has taken part in, counted from the job's beginning.

        In local:H and local:Ts it counts rounds, each of which ends with an update. In all other modes it is the clock.
        """
        return self._strategy.round

    def prepare(
        self,
        *things: Any,
        bucket_bytes: int | None = None,
        non_finite: str = "refuse",
        gradient_wire: str | None = None,
        weight_wire: str | None = None,
        overlap: bool | None = None,
        seed: int = 0,
        ddp_options: Mapping[str, Any] | None = None,
        outer: Mapping[str, Any] | None = None,
        own: Sequence[Any] = (),
    ) -> Any:
        """Makes models, their optimizers, loaders and schedulers ready to train; returns them in the order given.

        A model moves to `device`, unless it is spread over several devices, and starts from rank 0's weights. An
        optimizer steps where the mode says; the state that it has already (momentum, moments) is taken over from
        rank 0. A loader yields this worker's share of the data, on `device`. Schedulers, and all else that has
        `state_dict` and `load_state_dict`, come back as they are; if the job is rolled back to a checkpoint, so is
        their state, and a worker that joins a job under way takes it over from another one. All models and their
        optimizers go into one call; more loaders may be prepared later. Blocks until every declared worker has joined.

        Called once more with an optimizer over parameters of the prepared models, it begins the next stage of the
        script: `optimizer = session.prepare(optimizer)`, or with the models as well. From the next step on the new
        optimizer steps its parameters, in place of those that had any of them, with the state that it brings: none, if
        it is fresh. All workers do so at the same point. Where it has parameters that no optimizer had, it blocks until
        all have, in a job with a world size.

        bucket_bytes: size of a bucket in the model, a multiple of 64; by default what the job has already, or what the
                      server chooses: it travels as 4 MiB on one machine, as 256 KiB to 4 MiB between hosts
        non_finite:   what to do with a gradient that holds an infinity or a NaN: "refuse" raises NonFiniteGradient
                      in `optimizer.step()`, and nothing of that step counts; "skip" leaves this worker's step out;
                      "allow" does not look
        gradient_wire, weight_wire: how float32 tensors travel between hosts: float32, bfloat16, float16, int8 or int4;
            by default as `--wire` (PS_WIRE) says, otherwise float32. Shards keep float32. Shared memory does, too, and
            a job with int8 or int4 does without it. Weights as int8 or int4 need sync or local:H
        overlap:      whether gradients leave while backward still runs: True, False, or None to do so as long as the
                      script does not change gradients between backward and step. The result is the same in all three
        seed:         of the loaders' shuffle, the same on all workers; pass number k is shuffled with seed + k in a job
                      with a world size
        ddp_options:  more arguments for DistributedDataParallel in mode ddp
        outer:        in modes local:H and local:Ts, settings of the job: "lr" (0.8), "momentum" (0.7) and "nesterov"
                      (True) of the servers' optimizer, and "warm_up" (64), the rounds of one step that the job begins
                      with, in which it averages. In local:H/F also "delay" (1) and "mixing" (0.5): how many steps
                      later what was pulled of a fragment is mixed in, and what the worker keeps of its own weights then

        own:          those of the things whose state is each worker's own, and not the job's as a schedule is: a worker
                      that joins late does not take it over from another. It is rolled back all the same

        Raises Unsupported, InvalidRequest, JobMismatch, JobInUse, or Unreachable; the model is unchanged then.
        Raises JobFinished where the job is done, and this worker is a late one of the launch that trained it.
        Raises LimitExceeded if other workers have not joined after the start timeout (PS_START_TIMEOUT, 1800 s).
        Raises NotShared where `transport` is "shm" and a shard cannot see this worker's memory, and other PSErrors with
        which servers refuse a worker.
        """
        given = sort_given(things)
        check_own(own, given.others)
        _check_process(self._pid)
        prepared: dict[int, Any] = {id(thing): thing for thing in given.others}
        if given.models or given.optimizers:
            options = PrepareOptions(
                bucket_bytes=bucket_bytes,
                non_finite=non_finite_named(non_finite),
                gradient_wire=wire_named(gradient_wire or self._config.wire[0]),
                weight_wire=wire_named(weight_wire or self._config.wire[1]),
                overlap=overlap,
                ddp=ddp_options or {},
                local=local_settings(self.mode, outer or {}),
            )
            if self._models and all(self._prepared.knows(model) for model in given.models):
                self._begin_stage([each for each in given.optimizers if not self._prepared.knows(each)], options)
            else:
                check_pairs(given)
                self._prepare_models(given.models, given.optimizers, options)
            prepared |= self._prepared.of([*given.models, *given.optimizers])
        for loader in given.loaders:
            prepared[id(loader)] = self._strategy.prepare_loader(loader, seed)
            self._has_loaders = True
        self._strategy.keep(given.others, own)
        in_order = tuple(prepared[id(thing)] for thing in things)
        return in_order[0] if len(in_order) == 1 else in_order

    def _prepare_models(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], options: PrepareOptions
    ) -> None:
        """Prepares models and optimizers, for the first time."""
        if self._models:
            raise InvalidRequest(
                "this session has its models already: hand all models and optimizers to one call of prepare; "
                "to begin anew (a notebook's cell run again), call connect again"
            )
        for model in models:
            if len({tensor.device for tensor in model.parameters()}) <= 1:  # others are spread over devices on purpose
                model.to(self.device)
        loops = loops_for(models, self._config.native, loops_folder(self._config.native_dir), c_compiler)
        if loops.text:
            log.log(logging.WARNING if loops.is_trouble else logging.INFO, "%s", loops.text)
        wrapped, steppers = self._strategy.prepare(models, optimizers, options)
        self._models, self._options = list(models), options
        speak_as(self._config.job, self.rank, self._config.log_level, self._config.log_format)
        self._take_back = [lend(model, self.no_sync) for model in wrapped]
        self._metrics.timer.begin("forward")
        self._prepared.add((*models, *optimizers), (*wrapped, *steppers))

    def _begin_stage(self, optimizers: Sequence[torch.optim.Optimizer], options: PrepareOptions) -> None:
        """Has other optimizers step the prepared models."""
        wire = wire_named(self._config.wire[0]), wire_named(self._config.wire[1])
        unsaid = PrepareOptions(gradient_wire=wire[0], weight_wire=wire[1], local=local_settings(self.mode, {}))
        if options not in (unsaid, self._options):
            raise InvalidRequest(
                "a later call of prepare goes on with the settings of the first one: leave out bucket_bytes, overlap "
                "and the like, or give the same"
            )
        if optimizers:
            self._prepared.add(optimizers, self._strategy.begin_stage(self._models, optimizers))

    # -- over all workers --------------------------------------------------------------------------------------------

    @property
    def is_main(self) -> bool:
        """Whether this is the worker that logs, saves or downloads for all: rank 0.

        In an elastic job it is the lowest live rank, known once `prepare` has joined. When that worker leaves or dies,
        the next one takes over, as soon as it hears of it: for a moment there may be none, or two. Use `broadcast` for
        a decision that exactly one worker must make.
        """
        return self._strategy.is_main

    def mean(self, x: Any, weight: float = 1.0) -> Any:
        """Returns the mean over all workers of a number, a tensor of any shape, or a dict of these, alike to the bit.

        It is sum(weight * x) / sum(weight), summed in float64 in the order of ranks. The x of a worker whose weight is
        0 is left out. A number comes back as a float, a tensor on its device: of its own dtype if that is a float's, of
        torch's default dtype if it is an integer's.

        This and the next three block until every live worker has made its call. Every worker makes the same calls in
        the same order. A worker that leaves or dies is not waited for. One that was away, or joins late, gets what the
        others had in the calls that it missed, and so decides what they decided.

        weight: a number from 0, such as how many samples of validation data x was taken over
        Raises InvalidRequest before `prepare`, for values or calls that differ between workers (all raise it), and
        for weights that are all 0; LimitExceeded for too many bytes (all raise it).
        """
        return self._collectives().mean(x, weight)

    def gather(self, x: Any) -> list[Any]:
        """Returns the values of all workers that take part, in the order of ranks; see `mean` for which these are.

        x: tensors, numbers, strings, None, and lists, tuples, sets and dicts of these; it may differ between workers.
           Tensors come back on the device of those in x, or on the session's
        Raises Unsupported for other types, InvalidRequest and LimitExceeded as `mean` does.
        """
        return self._collectives().gather(x)

    def broadcast(self, x: Any, source: int = 0) -> Any:
        """Returns the value of one worker on all workers; the others' are ignored. Types are those of `gather`.

        source: its rank. If it takes no part, as it left or died, it is the lowest rank of those that do.
        """
        return self._collectives().broadcast(x, source)

    def barrier(self) -> None:
        """Returns when every live worker has called it, as `mean` does, with all their steps in the model's weights.

        In ssp, async and with a quorum it fetches the weights for that: they have every update that was acknowledged
        before the call, and are the same on all workers until one makes a step. Weights that the script has set since
        its last step stay. In sync the last step's are these already, and in local:H, where a worker has weights of its
        own within a round, `global_weights` has them. `mean`, `gather` and `broadcast` fetch nothing.
        """
        self._collectives().barrier()
        self._strategy.refresh()

    def log(self, **values: Any) -> None:
        """Shows values of this worker, such as its loss, to all that watch the job: `session.log(loss=loss.item())`.

        The last value of each name and an exponential mean travel with the next heartbeat, to `ps-server status
        --watch`, to the page and its curves; /metrics of this worker has them as ps_worker_value. No value is sent by
        itself, and none is kept in a checkpoint, so it may be called at every step. Several calls may name different
        values. In single and ddp, they are in /metrics alone.

        values: up to 8 names in all, each a letter of a to z, then letters, digits and '_', up to 40 characters. A
                number, or a tensor of one element, of which a GPU has to be waited for. NaN is shown as it is.
        Raises InvalidRequest, and takes none of the values, for other names and values, and for a ninth name. Not
        thread-safe: for the thread that trains.
        """
        _check_process(self._pid)
        self._metrics.log(values)

    def progress(self, total: int) -> None:
        """Says how many steps this worker makes in all, so that those who watch see how much is left, and how long.

        It travels with the next heartbeat: `ps-server status`, the page and /metrics (ps_worker_total_steps) show it
        beside the clock. Nothing in training depends on it, and a later call replaces it.

        total: the `clock` at which this worker is done, 1 to 2^53 steps: `passes * len(loader)`, for each optimizer
               that steps in each batch; `session.clock + steps` where the loop goes on from a clock above 0
        Raises InvalidRequest for other totals.
        """
        _check_process(self._pid)
        self._metrics.progress(total)

    def timeline(self, path: str | os.PathLike[str], steps: int = 50) -> None:
        """Records the steps behind the next `optimizer.step()`: of each bucket, when it was ready, sent, staged,
        applied, admitted and landed, on this worker's clock. Perfetto opens the file, a Chrome trace.

        It is written when so many steps are recorded, or at the end: trace.json as trace-rank0.json, by the worker of
        rank 0. Called before `prepare`, it records from the first step on. A recording that is under way is written
        first. In single and ddp no bucket travels: a warning says so, and nothing is written.

        Raises InvalidRequest for a path in no directory that is there, and for a number of steps below 1.
        """
        _check_process(self._pid)
        self._record(Wanted(check("timeline", path), 1, check("timeline_steps", steps)))

    def _record(self, wanted: Wanted) -> None:
        if self._config.consistency is None:
            log.warning("mode %s has no timeline: no bucket travels to a shard", self.mode)
            return
        self._timeline.record(wanted)

    def _collectives(self) -> Collectives:
        _check_process(self._pid)
        return Collectives(self._strategy, self.device)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Runs backward passes that only add to the gradients; the next `optimizer.step()` sends their sum.

        In the modes with servers a script may accumulate without it; then some bytes may be sent twice.
        """
        with self._strategy.no_sync():
            yield

    def global_weights(self, model: nn.Module | None = None) -> dict[str, Any]:
        """Returns a copy of a model's state_dict with the weights of the job, to evaluate and to save, in every mode.

        ssp, async, quorum: every update that was acknowledged before the call, of any worker. They are fetched from the
                            servers, and the model has them from then on. With a quorum an update that waits for more
                            workers is made with those that have come. After `barrier` they have all workers' steps
        single, ddp, sync:  the model's own, which are these already. No server is called
        local:H, local:Ts:  those that the round began with, the same on all workers. The model has weights of its own
                            within a round, and keeps them. No server is called
        local:H/F:          what was pulled last of each fragment; one that is under way is waited for

        Buffers, such as BatchNorm's statistics, are this worker's. Weights that the script has set since its last step
        are as it has set them. After `close` they are the model's own.

        model: the one of several; may be left out where there is one
        Raises PSError as `optimizer.step()` does.
        """
        models = self._models
        if model is None and len(models) != 1:
            raise InvalidRequest(f"session.global_weights() has {len(models)} models to choose from: hand one over")
        own = models[0] if model is None else self.unwrap(model)
        if not any(own is each for each in models):
            raise InvalidRequest("session.global_weights(model) takes a model that was handed to prepare")
        _check_process(self._pid)
        self._strategy.refresh()
        return with_values(own, self._strategy.global_values())

    @staticmethod
    def unwrap(model: nn.Module) -> nn.Module:
        """Returns the user's own module, whatever `prepare` returned: for state_dict and for saving."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    def close(self) -> None:
        """Leaves the job and closes every connection; may be called more than once."""
        if self._pid != os.getpid():
            return  # a forked child, of a DataLoader say: the session is its parent's
        self._warn_of_unused_loaders()
        self._strategy.close()
        for take_back in self._take_back:  # another session may prepare these models
            take_back()
        self._timeline.close()
        self._metrics.close()
        atexit.unregister(self.close)
        with _opening:
            if self in _open:
                _open.remove(self)

    def _warn_of_unused_loaders(self) -> None:
        """Warns where a script has trained, and asked no loader that `prepare` returned for a batch."""
        has_trained, has_asked = self._metrics.timer.has_gradients, self._metrics.timer.has_asked
        divides = self._has_loaders and self.mode != "single" and self._config.world_size != 1
        if divides and has_trained and not has_asked and not is_cut_short():
            log.warning(
                "no batch was asked of a loader that prepare returned: this worker has trained with all of the data, "
                "and not with its share. Write model, optimizer, loader = session.prepare(model, optimizer, loader)"
            )
        self._has_loaders = False  # it is said once

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_process(pid: int) -> None:
    if pid != os.getpid():
        raise InvalidRequest("this session belongs to the parent process; call connect after the fork")


# -- where and when ----------------------------------------------------------------------------------------------------


def _device(local_rank: int) -> torch.device:
    """Returns a GPU of this worker's own where there is one; workers beyond the GPUs share them in turn."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def _close_earlier(config: WorkerConfig) -> None:
    """Closes what an earlier `connect` of this process left open in the same place."""
    if config.consistency is None or config.rank is None:
        return
    with _opening:
        earlier = [session for session in _open if _is_at(session, config)]
    for session in earlier:
        log.warning(
            "an earlier session of this process was worker %d of job %s at %s: it is closed, and a new one begins",
            *(config.rank, config.job, config.server),
        )
        session.close()


def _serve_metrics(metrics: WorkerMetrics, config: WorkerConfig) -> None:
    """Serves /metrics where the servers' side can reach it, if allowed; otherwise for this machine alone."""
    tls = config.access.tls if config.access.tls and config.access.tls.cert else None
    host, known = config.metrics_host, True
    if host is None:
        host = own_address(config.server)
        known = tls is not None or config.metrics_insecure or is_loopback(host)
        host = host if known else "127.0.0.1"
    require_encryption(host, tls is not None, config.metrics_insecure, "metrics", "--metrics-insecure")
    metrics.serve(host, config.metrics_port and config.metrics_port + config.local_rank, tls, known)


def _is_at(session: Session, config: WorkerConfig) -> bool:
    """Whether a session is one of this process for the same place."""
    own, other = ((each.server, each.job, each.rank, each.launch.name) for each in (session._config, config))
    return own == other and session._pid == os.getpid()


def close_open_sessions() -> None:
    """Closes the sessions that this process has open, for a launcher whose worker ends before its process does."""
    with _opening:
        still_open = list(_open)
    for session in still_open:
        session.close()


def _close_at_exit(session: Session) -> None:
    """Leaves the job when the script ends, also by SIGTERM, which would skip atexit."""
    if multiprocessing.parent_process() is None:
        # It keeps the session alive: a script may hold it in a function that has ended.
        atexit.register(session.close)
    else:
        # A process that multiprocessing forked ends without atexit. And where it does not, as under mp.spawn, an error
        # that ended the worker's function is gone by then, so that the worker would seem to have come to its end.
        multiprocessing.util.Finalize(None, session.close, exitpriority=0)
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        ending = threading.Event()
        # What is registered last is called first. A SIGTERM after it ends a script that is ending already: no exception
        # is to interrupt that.
        atexit.register(ending.set)

        def terminate(number: int, frame: FrameType | None) -> None:
            if not ending.is_set():
                end_by_signal(number)

        signal.signal(signal.SIGTERM, terminate)
