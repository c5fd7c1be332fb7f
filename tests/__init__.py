"""The tests: each folder of claims beside the tools that they share.

tools/        clusters, clients and faults that several tests use
scripts/      training scripts that tests start, as users write them
simulation/   clusters in virtual time, a seed each
chaos/        faults at random on real processes, and the counting oracle that judges them
attacks/      inputs that once broke a server
protocol/     the contract: messages, layout, modes, errors
server/       the rules of a shard and of the coordinator, and their parts
worker/       what a session does to models, optimizers, data and state
launch/       both commands, launchers, settings
cluster/      whole clusters: consistency, recovery, checkpoints, metrics
security/     bad input, hostile clients, permissions, TLS
frameworks/   Lightning, Hugging Face
project/      the sources, documents, deployment files, examples and benchmarks themselves
"""
