"""Train an ordinary PyTorch model on a parameter server, with DDP, or alone: the same script, the same loop.

import ps_torch as ps

session = ps.connect()
model, optimizer, loader = session.prepare(model, optimizer, loader)

Scripts import the names of __all__ from ps_torch; `import ps_worker` goes on working in them for one version.

values.py       Values that pass between the packages of a worker: options of training, rosters, assignments, results of
                calls
connecting.py   `connect`, and the sessions that this process has open
session.py      The session that `connect` returns: one worker's part in one job
by_mode.py      The strategy of each mode
given.py        The arguments of `prepare`: sorted by what they are, and checked
group.py        A worker that is a group of processes: how its members agree
neighbours.py   The other members of a group: whether they have come, and whether they go on
training_thread.py Where the training thread of a member is: in a call, in a collective, or elsewhere in the script
prepared.py     Maps the arguments of `prepare` to its results
row_feed.py     A live copy of a table in a process that does not train
reading_blocks.py Blocks in which readers see no change, and the changes that wait for their end
followed_model.py `subscribe`: a job's weights in a process that does not train
made_editions.py  Copies of an edition for models of another type or device, in a thread
followed_tables.py The rows of such a model: a copy of each of its tables, which follows training
fitted_model.py How such a model fits the job: what each of its tensors is made of, and which tables it reads
edition_tensors.py A job's weights at one version: as tensors, as files, and for models with other names
config.py       A worker's settings: arguments first, then PS_* variables, then a launcher's, then defaults
strategies/     How a worker trains: alone, with DDP, or on parameter servers
model/          A model as flat buffers, its job, and its step
cluster/        Connections to the servers: the only package here that uses gRPC and protobuf messages
tables/         Tables of rows in a model: modules that look like torch's embeddings
data/           Each worker's share of the data
state/          A worker's own state for checkpoints
timeline/       Records when each bucket of a step was ready, sent, staged, applied, admitted and landed
metrics.py      A worker's metrics for Prometheus: above all, where a step's time goes
launched.py     A worker's output for the person at the launcher: log lines with its rank, and errors in one line
accelerate.py   Accelerate on parameter servers: a `connect` that shows Accelerate a single process
huggingface.py  The Trainer of Hugging Face on parameter servers
lightning.py    Lightning on parameter servers: a strategy for Trainer, and one for Fabric
engines/        Engines that generate text with a job's newest weights: vLLM, SGLang, transformers
ray/            Parameter servers on Ray: for Ray Train, and for plain actors and Tune
launch_server_settings.py The settings of servers that `ps-worker run` starts, and the options that `ps-server up` gets
cli.py          The command `ps-worker`
"""

from typing import TYPE_CHECKING, Any

import ps_runtime  # noqa: F401  # sets what grpc reads when it is imported
from ps_protocol.errors import (
    Fenced,
    FinishedWithout,
    InvalidRequest,
    JobFinished,
    JobInUse,
    JobMismatch,
    LimitExceeded,
    NonFiniteGradient,
    NotFound,
    NotShared,
    PSError,
    UnknownWorker,
    Unreachable,
    Unsupported,
)
from ps_runtime.version import version

if TYPE_CHECKING:
    from ps_worker.connecting import connect
    from ps_worker.edition_tensors import MadeOf
    from ps_worker.followed_model import WeightFeed, subscribe
    from ps_worker.row_feed import RowFeed
    from ps_worker.session import Session
    from ps_worker.tables.freezing import freeze
    from ps_worker.tables.given_rows import RowFile
    from ps_worker.tables.modules import Embedding, EmbeddingBag
    from ps_worker.tables.table_optimizers import Ftrl, RowWiseAdagrad

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "Fenced",
    "FinishedWithout",
    "Ftrl",
    "InvalidRequest",
    "JobFinished",
    "JobInUse",
    "JobMismatch",
    "LimitExceeded",
    "MadeOf",
    "NonFiniteGradient",
    "NotFound",
    "NotShared",
    "PSError",
    "RowFeed",
    "RowFile",
    "RowWiseAdagrad",
    "Session",
    "UnknownWorker",
    "Unreachable",
    "Unsupported",
    "WeightFeed",
    "connect",
    "freeze",
    "subscribe",
]

__version__ = version()


def __getattr__(name: str) -> Any:
    """Imports a name that needs torch on its first use: the launcher and `ps-worker --help` run without torch."""
    if name == "connect":
        from ps_worker import connecting

        return connecting.connect
    if name == "Session":
        from ps_worker import session

        return session.Session
    if name in ("Embedding", "EmbeddingBag"):
        from ps_worker.tables import modules

        return getattr(modules, name)
    if name == "RowFile":
        from ps_worker.tables import given_rows

        return given_rows.RowFile
    if name == "freeze":
        from ps_worker.tables import freezing

        return freezing.freeze
    if name == "RowFeed":
        from ps_worker import row_feed

        return row_feed.RowFeed
    if name == "MadeOf":
        from ps_worker import edition_tensors

        return edition_tensors.MadeOf
    if name in ("WeightFeed", "subscribe"):
        from ps_worker import followed_model

        return getattr(followed_model, name)
    if name in ("Ftrl", "RowWiseAdagrad"):
        from ps_worker.tables import table_optimizers

        return getattr(table_optimizers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
