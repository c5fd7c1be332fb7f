"""The session that `ps_torch.connect` returns: one worker's part in one job.

prepare    Models, optimizers, loaders and schedulers are sorted and handed to the strategy of the mode. This file knows
           nothing else about how a worker trains.
train      The script runs its own loop with the prepared things. The session offers its rank and clock, values over
           all workers, and `no_sync`.
close      The worker leaves the job.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ps_protocol.errors import InvalidRequest
from ps_protocol.numpy_numbers import as_python
from ps_runtime.credentials import is_loopback, require_encryption
from ps_runtime.own_address import own_address
from ps_runtime.signals import is_cut_short, undisturbed
from ps_worker.by_mode import STRATEGIES
from ps_worker.config import TIMELINE, TIMELINE_STEPS, WorkerConfig
from ps_worker.given import check_own, check_pairs, non_finite_named, sort_given, wire_named
from ps_worker.launched import speak_as
from ps_worker.metrics import WorkerMetrics
from ps_worker.model.buffers import with_values
from ps_worker.model.local_settings import local_settings
from ps_worker.model.no_sync import lend
from ps_worker.model.refused import has_scaler
from ps_worker.model.sharded import is_offloaded
from ps_worker.prepared import Prepared
from ps_worker.strategies.collectives import Collectives
from ps_worker.tables.table_library import loops_for
from ps_worker.timeline.recording import RecordingRequest, Timeline
from ps_worker.values import PrepareOptions

log = logging.getLogger("ps_worker")


class Session:
    """One worker's part in one job, from `connect` to `close`. It is also a context manager.

    Attributes:
        mode: "single", "ddp", "sync", "ssp:K", "async" or "local:H".
        device: The device for models and batches: a GPU of this worker's own if torch sees one, otherwise the CPU.
        metrics_address: HOST:PORT at which this worker serves /metrics.
    """

    def __init__(self, config: WorkerConfig, forget: Callable[[Session], None]) -> None:
        self._config = config
        self._pid = os.getpid()
        self._models: list[nn.Module] = []  # the script's own modules, after `prepare`
        self._take_back: list[Callable[[], None]] = []  # each removes `no_sync` from a model
        self._prepared, self._options = Prepared(), PrepareOptions()
        self._has_loaders = False  # whether `prepare` returned a loader
        self.mode = config.mode
        self.device = _device(config.local_rank)
        self._metrics = WorkerMetrics()
        _serve_metrics(self._metrics, config)
        self.metrics_address = self._metrics.address
        self._timeline = Timeline()
        make = STRATEGIES[config.mode.partition(":")[0]]
        try:
            self._strategy = make(config, self._metrics, self.device, self._timeline)
        except BaseException:
            self._metrics.close()  # frees the port for another session
            raise
        if config.timeline is not None:
            self._record(RecordingRequest(config.timeline, config.timeline_first, config.timeline_steps))
        self._forget = forget

    def __repr__(self) -> str:
        config = self._config
        job = "" if config.consistency is None else f" job={config.job!r} server={config.server!r}"
        place = f"mode={self.mode!r} rank={self.rank} world_size={self.world_size}"
        return f"<Session {place}{job} clock={self.clock}>"

    @property
    def rank(self) -> int:
        """This worker's rank. An elastic job assigns it in `prepare`."""
        return self._strategy.rank

    @property
    def local_rank(self) -> int:
        """This worker's number among the workers of its host, from 0, as the launcher counts them."""
        return self._config.local_rank

    @property
    def world_size(self) -> int:
        """The number of workers: the declared one, or in an elastic job that of the live workers."""
        return self._strategy.world_size

    @property
    def clock(self) -> int:
        """The number of steps that this worker has finished since the job began.

        With several optimizers the steps of all of them count. A rollback to a checkpoint also sets the clock back. In
        local:Ts workers make unequal numbers of steps, so the clock is this worker's own; `round` is the same on all.
        """
        return self._strategy.clock

    @property
    def round(self) -> int:
        """The number of weight updates that this worker has taken part in since the job began.

        In local:H and local:Ts it counts rounds, each of which ends with an update. In all other modes it equals the
        clock.
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
        group: Any = None,
    ) -> Any:
        """Makes models, optimizers, loaders and schedulers ready to train. Returns them in the order given.

        * A model moves to `device`, unless it is spread over several devices, and starts from rank 0's weights.
        * An optimizer steps as the mode says. State that it has already (momentum, moments) is taken from rank 0.
        * A loader yields this worker's share of the data, on `device`.
        * Schedulers, and other objects with `state_dict` and `load_state_dict`, are returned as they are. A rollback of
          the job restores their state. A worker that joins a running job gets it from another worker.

        All models and their optimizers go into one call; more loaders may be prepared later. The call blocks until
        every declared worker has joined.

        A later call with a new optimizer over parameters of the prepared models begins the next stage of the script:
        `optimizer = session.prepare(optimizer)`. From the next step on the new optimizer steps its parameters, with the
        state that it brings, and replaces every earlier optimizer that had any of them. All workers make this call at
        the same step. If the new optimizer has parameters that no optimizer had, and the job has a world size, the call
        blocks until all workers have made it.

        Args:
            *things: Models, optimizers, loaders, schedulers and other stateful objects, in any order.
            bucket_bytes: Bytes of the model in a bucket, a multiple of 64. By default the job's value, or the server's
                choice: 4 MiB on one machine, 256 KiB to 4 MiB on the wire between hosts.
            non_finite: How to treat a gradient with an infinity or a NaN. "refuse" raises NonFiniteGradient in
                `optimizer.step()`, and nothing of that step counts. "skip" leaves this worker's step out. "allow" does
                not check.
            gradient_wire, weight_wire: The wire format of float32 tensors between hosts: "float32", "bfloat16",
                "float16", "int8" or "int4". By default the setting `--wire` (PS_WIRE), otherwise float32. Shards always
                keep float32. Shared memory carries float32, too, so a job with int8 or int4 does not use it. Weights as
                int8 or int4 need sync or local:H.
            overlap: Whether gradients are sent while backward still runs: True or False. None does so as long as the
                script does not change gradients between backward and step. The result is the same in all three cases.
            seed: The seed of the loaders' shuffle, the same on all workers. In a job with a world size pass k is
                shuffled with seed + k.
            ddp_options: More arguments for DistributedDataParallel, in mode ddp.
            outer: Settings of local:H and local:Ts. "lr" (0.8), "momentum" (0.7) and "nesterov" (True) are those of the
                outer optimizer. "warm_up" (64) is the number of rounds of one averaged step that the job begins with.
                In local:H/F "delay" (1) is how many steps after its pull a fragment is mixed in, and "mixing" (0.5)
                is the share of the worker's own weights in that mix.
            own: Those of the things whose state belongs to this worker alone. A worker that joins a running job does
                not get their state from another worker. A rollback restores it all the same.
            group: The processes that together are this worker, which hold one model in pieces, or in stages of a
                pipeline: the DeviceMesh that it is cut over, or a process group. All of them make the same calls of
                the session. See docs/groups.md for what is supported.

        Returns:
            The prepared things, in the order given; a single thing is not in a tuple.

        Raises:
            Unsupported, InvalidRequest, JobMismatch, JobInUse, Unreachable: The worker cannot join as it asks to. The
                model is unchanged then.
            JobFinished: The launch that this worker belongs to has finished the job.
            FinishedWithout: The same, in a process that has trained another job of this launch already.
            LimitExceeded: Other workers have not joined within the start timeout (PS_START_TIMEOUT, 1800 s).
            NotShared: The transport is "shm", and a shard cannot use this worker's memory.
            PSError: Servers refuse the worker for another reason; the message says which.

        Example:
            import ps_torch
            import torch
            from torch.utils.data import DataLoader, TensorDataset

            session = ps_torch.connect()
            data = TensorDataset(torch.rand(64, 4), torch.rand(64, 1))
            loader = DataLoader(data, batch_size=8, shuffle=True)
            model = torch.nn.Linear(4, 1)
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)

            model, optimizer, loader, schedule = session.prepare(model, optimizer, loader, schedule)
            for epoch in range(2):
                for x, y in loader:  # this worker's share
                    optimizer.zero_grad()
                    loss = torch.nn.functional.mse_loss(model(x), y)
                    loss.backward()
                    optimizer.step()
                schedule.step()
            session.close()
        """
        given = sort_given(things)
        check_own(own, given.others)
        _check_process(self._pid)
        prepared: dict[int, Any] = {id(thing): thing for thing in given.others}
        if given.models or given.optimizers:
            options = PrepareOptions(
                bucket_bytes=as_python(bucket_bytes),
                non_finite=non_finite_named(non_finite),
                gradient_wire=wire_named(gradient_wire or self._config.wire[0]),
                weight_wire=wire_named(weight_wire or self._config.wire[1]),
                overlap=overlap,
                ddp=ddp_options or {},
                local=local_settings(self.mode, outer or {}),
                group=group,
                has_scaler=has_scaler(given.others),
            )
            if self._models and all(self._prepared.knows(model) for model in given.models):
                self._begin_stage([each for each in given.optimizers if not self._prepared.knows(each)], options)
            else:
                check_pairs(given)
                self._prepare_models(given.models, given.optimizers, options)
            prepared |= self._prepared.of([*given.models, *given.optimizers])
        for loader in given.loaders:
            prepared[id(loader)] = self._strategy.prepare_loader(loader, as_python(seed))
            self._has_loaders = True
        self._strategy.keep(given.others, own)
        in_order = tuple(prepared[id(thing)] for thing in things)
        return in_order[0] if len(in_order) == 1 else in_order

    def _prepare_models(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], options: PrepareOptions
    ) -> None:
        """Prepares the models and optimizers of the first call."""
        if self._models:
            raise InvalidRequest(
                "this session has its models already: hand all models and optimizers to one call of prepare; "
                "to begin anew (a notebook's cell run again), call connect again"
            )
        for model in models:
            # A model on several devices was placed by the script. FSDP keeps an offloaded model on CPUs.
            if len({tensor.device for tensor in model.parameters()}) <= 1 and not is_offloaded([model]):
                model.to(self.device)
        loops = loops_for(models, self._config.native)
        if loops is not None:
            log.log(logging.WARNING if loops.is_trouble else logging.INFO, "%s", loops.text)
        wrapped, steppers = self._strategy.prepare(models, optimizers, options)
        self._models, self._options = list(models), options
        speak_as(self._config.job, self.rank, self._config.log_level, self._config.log_format)
        self._take_back = [lend(model, self.no_sync) for model in wrapped]
        self._metrics.timer.begin("forward")
        self._prepared.add((*models, *optimizers), (*wrapped, *steppers))

    def _begin_stage(self, optimizers: Sequence[torch.optim.Optimizer], options: PrepareOptions) -> None:
        """Replaces optimizers of the prepared models."""
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
        """Whether this worker logs, saves and downloads for all: rank 0.

        In an elastic job it is the lowest live rank, which is known after `prepare`. When that worker leaves or dies,
        the next one takes over as soon as it learns of it, so for a moment there may be none or two. Use `broadcast`
        for a decision that exactly one worker must make.
        """
        return self._strategy.is_main

    def mean(self, x: Any, weight: float = 1.0) -> Any:
        """Returns the mean of a value over all workers. The result is bit-identical on all of them.

        It is sum(weight * x) / sum(weight), summed in float64 in the order of ranks.

        `mean`, `gather`, `broadcast` and `barrier` block until every live worker has made its call, so all workers make
        the same calls in the same order. A worker that leaves or dies is not waited for. A worker that was away, or
        joins late, gets the results of the calls that it missed, and so decides as the others did.

        Args:
            x: A number, a tensor of any shape, or a dict of these. A number returns as a float. A tensor returns on its
                device, in its own dtype if that is a floating type, otherwise in torch's default dtype.
            weight: This worker's weight, 0 or more, such as the number of validation samples behind x. A weight of 0
                leaves x out.

        Returns:
            The mean, in the shape of x.

        Raises:
            InvalidRequest: The call comes before `prepare`, all weights are 0, or the values or calls differ between
                workers; then all workers raise it.
            LimitExceeded: The values have too many bytes; all workers raise it.

        Example:
            val_loss = session.mean(0.25, weight=100)  # 100 samples on this worker
        """
        return self._collectives().mean(x, weight)

    def gather(self, x: Any) -> list[Any]:
        """Returns the values of all workers that take part, in the order of ranks. See `mean` for which workers these
        are.

        Args:
            x: Tensors, numbers, strings, None, and lists, tuples, sets and dicts of these. It may differ between
                workers. Tensors return on the device of the tensors in x, or on the session's.

        Raises:
            Unsupported: x has a value of another type.
            InvalidRequest, LimitExceeded: As for `mean`.

        Example:
            names = session.gather({"rank": session.rank, "score": 0.5})
        """
        return self._collectives().gather(x)

    def broadcast(self, x: Any, source: int = 0) -> Any:
        """Returns the value of one worker on all workers, and ignores the values of the others.

        Args:
            x: The value, of the types of `gather`.
            source: The rank whose value counts. If that worker has left or died, the lowest rank that takes part
                replaces it.

        Raises:
            Unsupported, InvalidRequest, LimitExceeded: As for `gather`.

        Example:
            seed = session.broadcast(torch.randint(2**31, (1,)).item())
        """
        return self._collectives().broadcast(x, source)

    def barrier(self) -> None:
        """Waits until every live worker has called it. The model's weights then contain the steps of all of them.

        In ssp, in async and with a quorum it fetches the weights. They contain every update that was acknowledged
        before the call, and are the same on all workers until one of them makes a step. Weights that the script has set
        since its last step stay as they are. In sync nothing has to be fetched. In local:H a worker keeps its own
        weights within a round; use `global_weights` there. `mean`, `gather` and `broadcast` fetch nothing.

        Raises:
            InvalidRequest: As for `mean`.
        """
        self._collectives().barrier()
        self._strategy.refresh()

    def log(self, **values: Any) -> None:
        """Publishes values of this worker, such as its loss, to everything that watches the job.

        The last value of each name and its exponential mean travel with the next heartbeat to `ps-server status
        --watch` and to the page. /metrics of this worker has them as ps_worker_value; in single and ddp they are there
        only. The call sends nothing by itself and costs little, so it may be made at every step. Several calls may name
        different values. Checkpoints do not keep them. The method is not thread-safe: call it from the thread that
        trains.

        Args:
            **values: Numbers, or tensors of one element, by name; reading a tensor waits for its GPU. At most 8 names
                in all, each a letter a-z and then letters, digits and '_', at most 40 characters. NaN is shown as NaN.

        Raises:
            InvalidRequest: A name or a value is of another kind, or it is a ninth name. None of the values is published
                then.

        Example:
            session.log(loss=0.5, accuracy=0.9)
        """
        _check_process(self._pid)
        self._metrics.log(values)

    def progress(self, total: int) -> None:
        """Announces how many steps this worker makes in all, so that watchers see how much is left.

        The total travels with the next heartbeat. `ps-server status`, the page and /metrics (ps_worker_total_steps)
        show it beside the clock. Training does not depend on it, and a later call replaces it.

        Args:
            total: The `clock` at which this worker ends, 1 to 2^53. It is `passes * len(loader)`, times the number of
                optimizers that step in each batch; or `session.clock + steps` if the loop continues from a clock above
                0.

        Raises:
            InvalidRequest: The total is not such a number.

        Example:
            session.progress(10 * len(loader))
        """
        _check_process(self._pid)
        self._metrics.progress(total)

    def timeline(self, path: str | os.PathLike[str], steps: int = 50) -> None:
        """Records the life of each bucket in the steps after the next `optimizer.step()`, as a Chrome trace for
        Perfetto.

        The trace shows when each bucket was ready, sent, staged, applied, admitted and landed, on this worker's clock.
        The file is written once `steps` steps are recorded, or at the end of the session. Called before `prepare`, the
        recording begins with the first step. A recording in progress is written first. In single and ddp no bucket
        travels, so the call only logs a warning.

        Args:
            path: The file. The worker's rank is added to its name: rank 0 writes trace.json as trace-rank0.json.
            steps: The number of steps.

        Raises:
            InvalidRequest: The directory of `path` does not exist, or `steps` is below 1.
        """
        _check_process(self._pid)
        self._record(RecordingRequest(TIMELINE.find(path), 1, TIMELINE_STEPS.find(steps)))

    def _record(self, wanted: RecordingRequest) -> None:
        if self._config.consistency is None:
            log.warning("mode %s has no timeline: no bucket travels to a shard", self.mode)
            return
        self._timeline.record(wanted)

    def _collectives(self) -> Collectives:
        _check_process(self._pid)
        return Collectives(self._strategy, self.device)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Returns a context in which backward passes only add to the gradients.

        The next `optimizer.step()` sends the sum. In the modes with servers a script may accumulate gradients without
        this context; some bytes may then be sent twice.

        Example:
            with session.no_sync():
                model(x).sum().backward()
            model(x).sum().backward()
            optimizer.step()
        """
        with self._strategy.no_sync():
            yield

    def global_weights(self, model: nn.Module | None = None, *, copy: bool = True) -> dict[str, Any]:
        """Returns a copy of a model's state_dict with the weights of the job, to evaluate or to save, in every mode.

        * ssp, async, quorum: The weights are fetched, and the model has them afterwards. They contain every update, of
          any worker, that was acknowledged before the call. With a quorum, an update that waits for more workers is
          made without them. After `barrier` the weights contain the steps of all workers.
        * single, ddp, sync: These are the model's own weights. No server is called.
        * local:H, local:Ts: These are the weights that the round began with, the same on all workers. The model keeps
          its own weights. No server is called.
        * local:H/F: These are the weights last pulled of each fragment. The call waits for a fragment in transit.

        Buffers, such as BatchNorm's statistics, are this worker's. Weights that the script has set since its last step
        are returned as it has set them. After `close` the model's own weights are returned.

        Args:
            model: One of the prepared models. It may be left out if there is only one.
            copy: False: in modes other than local the model's own tensors, which the next step changes, in place of a
                copy. That takes no memory.

        Raises:
            InvalidRequest: `model` is left out and there are several, or it was not prepared by this session.
            PSError: Servers fail, as in `optimizer.step()`.

        Example:
            torch.save(session.global_weights(), "model.pt")
        """
        models = self._models
        if model is None and len(models) != 1:
            raise InvalidRequest(f"session.global_weights() has {len(models)} models to choose from: hand one over")
        own = models[0] if model is None else self.unwrap(model)
        if not any(own is each for each in models):
            raise InvalidRequest("session.global_weights(model) takes a model that was handed to prepare")
        _check_process(self._pid)
        self._strategy.refresh()
        values = self._strategy.global_values()
        if copy or values:
            return with_values(own, values)
        state: dict[str, Any] = own.state_dict()
        return state

    @staticmethod
    def unwrap(model: nn.Module) -> nn.Module:
        """Returns the script's own module, whatever `prepare` returned for it: for `state_dict` and for saving."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    def close(self) -> None:
        """Leaves the job and closes every connection. Further calls do nothing.

        A signal that comes meanwhile acts when the worker has left. A second Ctrl-C acts at once.

        Raises:
            InvalidRequest: The job was rolled back to a checkpoint after the script's last loop, so that steps of it
                are lost. The worker has left all the same, and its job is not finished. Started again, it continues. A
                process that ends without this call logs the error, and ends with code 1.
        """
        if self._pid != os.getpid():
            return  # a forked child, such as a DataLoader's worker: the session belongs to its parent
        with undisturbed():  # a second signal must not keep the worker from leaving with its state
            self._warn_of_unused_loaders()
            try:
                self._strategy.close()
            finally:
                for take_back in self._take_back:  # allows another session to prepare these models
                    take_back()
                self._timeline.close()
                self._metrics.close()
                self._forget(self)

    def _warn_of_unused_loaders(self) -> None:
        """Warns if the script has trained and never asked a prepared loader for a batch."""
        has_trained, has_asked = self._metrics.timer.has_gradients, self._metrics.timer.has_asked
        divides = self._has_loaders and self.mode != "single" and self._config.world_size != 1
        if divides and has_trained and not has_asked and not is_cut_short():
            log.warning(
                "no batch was asked of a loader that prepare returned: this worker has trained with all of the data, "
                "and not with its share. Write model, optimizer, loader = session.prepare(model, optimizer, loader)"
            )
        self._has_loaders = False  # warn once

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_process(pid: int) -> None:
    if pid != os.getpid():
        raise InvalidRequest("this session belongs to the parent process; call connect after the fork")


def _device(local_rank: int) -> torch.device:
    """Returns a GPU of this worker's own if there is one. Workers beyond the number of GPUs share them in turn."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def _serve_metrics(metrics: WorkerMetrics, config: WorkerConfig) -> None:
    """Serves /metrics at an address that the servers' hosts can reach, if that is allowed; otherwise on loopback."""
    tls = config.access.tls if config.access.tls and config.access.tls.cert else None
    host, known = config.metrics_host, True
    if host is None:
        host = own_address(config.server)
        known = tls is not None or config.metrics_insecure or is_loopback(host)
        host = host if known else "127.0.0.1"
    require_encryption(host, tls is not None, config.metrics_insecure, "metrics", "--metrics-insecure")
    metrics.serve(host, config.metrics_port and config.metrics_port + config.local_rank, tls, known)
