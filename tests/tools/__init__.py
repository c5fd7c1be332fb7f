"""Clusters, clients and faults that several tests share.

cluster.py              Real clusters of servers in this process, on free ports
one_process.py          A coordinator and its shards in one process: calls instead of gRPC, and a clock that waits move
cable.py                A cable between one worker and the servers, which a test cuts and plugs in again
heartbeats.py           Heartbeats that come more often than by default
row_ids.py              The mix of ids once more, with whole numbers
rpc_faults.py           Loses, delays and repeats calls, of gRPC and of data connections
browsing.py             A request as a browser makes it
engine_sources.py       What the adapters of inference engines use of an engine, read from its sources
engine_stand_ins.py     Stand-ins of vLLM and SGLang
http2.py                Frames of HTTP/2 by hand: just enough to be taken for a caller
slow_client.py          Clients that send one byte at a time
crowded.py              Many connections to one port, of clients that say nothing
frame_client.py         A data connection without a session: every frame by hand
pythons.py              What needs no torch, on every Python that is promised and here: `make test-pythons`
raw_worker.py           A worker without a session: a test sends every message by hand
rules.py                Looks at update rules, as tests need them
contract_client.py      A worker that knows the contract and nothing else of this project
record_worker.py        Records the messages of a worker's life, to be kept with a release
recordings.py           Sends what an earlier release's worker sent to servers of today
sharing_worker.py       The same, with a segment that it shares with the shard
partitions.py           One job on one shard, without threads
outbox.py               What comes of a pull there
checkpoint_files.py     Checkpoints that a test writes itself, without a cluster
held_disk.py            A disk that holds back what is read of checkpoints until a test lets it go
object_store.py         A server of this machine that speaks S3, with one bucket
rollbacks.py            A job whose workers train, have checkpoints made, and join again after a rollback
optimizers.py           Each optimizer of a shard, with hyper-parameters that are not the defaults
small_models.py         Weights and data that follow from a seed, one step, and comparisons of weights
said.py                 What workers of a test have logged
small_steps.py          A small model, its optimizers and its batches, for tests of local steps
special_numbers.py      Numbers that show how something rounds: of all magnitudes, subnormal, and not finite
row_gradients.py        What a step contributes to a table, from a gradient for each occurrence of an id
table_model.py          A model with two tables and a layer, and how it is trained
table_shards.py         A job with one table on one of several shards, trained without a server around it
whole_steps.py          Steps that one shard has and the other has not, and models whose weights tell which steps count
table_worker.py         A job with one table in servers of one process, and a worker that pushes rows to it
unfinished.py           Calls whose request never ends
counted_rounds.py       The counting oracle for local steps: each sample adds 1, and each round leaves a mark
disturbed_rounds.py     Rounds of local steps that are disturbed in the middle: a shard is lost, or all processes end
counting.py             The counting oracle for data: each sample adds 1 to a cell of its own
one_thread.py           Has torch compute in the calling thread alone, as servers do
oracle_run.py           A job of the counting oracle in threads, to which something happens on the way
crowd.py                The view of a job of many workers, without these
cases.py                The cases of a claim: a few in every run, the others among the long tests
claims.py               How tests of claims over many examples run: with the same examples every time
terminal.py             A terminal in place of standard error
planted.py              A folder with modules that no program of this project is to run
launching.py            Commands as processes, to their end or while they run; scripts as modules
lines.py                An interrupt at a chosen line of a file
learning_runs.py        What a run of examples/rl has left, compared with what it promises
served_model.py         Asks examples/serve.py over HTTP, and the small model that it serves
compose_files.py        The compose files as they stand, and who is who in them
kubernetes.py           The files of deploy/kubernetes, as they stand and as kubectl renders them
pods.py                 Runs the pods of Kubernetes objects: on loopback, or where a place says
container_place.py      Containers for those pods: a network namespace each, another user, a read-only root
modes.py                Modes as tests name them, with a quorum and its grace
network.py              A real network of network namespaces on a switch
prometheus_rule.py      Writes the alerts for Prometheus' operator: `make alerts`
slurm.py                A real Slurm of two nodes on this machine
rays.py                 A real Ray of three nodes on this machine, and the progress of workers that train there
documented_metrics.py   What docs/metrics.md says of each metric, read from its tables
files_that_run.py       Which files run while something is done
editions.py             Buckets of an edition of a small job, as readers get them
exchanges.py           Strategies for requests of a step, and for bytes that say the same as no generated class does
feeding.py             A shard with a job of one vector, and readers of it that a test moves by hand
followed_trainer.py    A worker that trains what others follow; and relays in this process
remembering_trainer.py  A worker that trains any model, and remembers its weights
forkserver.py           Processes that start in a moment: forks of one that has imported everything
groups.py               Groups of processes that train: what they begin and end with
islands.py              Rounds of local steps by hand, in plain torch
framework_processes.py  Workers of Lightning or Hugging Face, each in a process of its own
fuzzing.py              One shard and one coordinator without a network, which take any bytes; their state as a hash
fuzz_requests.py        Well-formed requests by method: what fuzzers start from
buf.py                  buf, which lints the contract, wherever its package has put it
requirements.py         What pyproject.toml asks for, to be locked, or the oldest version of each
audit.py                pip-audit behind `make audit`, and what it means when it cannot ask
fuzz.py                 The coverage-guided fuzzer behind `make fuzz`
imports.py              Draws what imports what in the packages; the tests of layers read it
"""
