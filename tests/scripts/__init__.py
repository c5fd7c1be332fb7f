"""Training scripts that tests start, as users write them.

train_everything.py       Trains in whichever way its launcher chooses, and leaves its weights in a file
train_in_group.py         One member of a group, with a model that fully_shard has cut
train_parallel.py         One member of a group whose model tensor parallel has cut, alone or with fully_shard
group_of_some.py          One of three processes, of which two are a group, and one of them is in another group, too
share_alike.py            One of three members that share the parameters that they hold alike
train_pipeline.py         One member of a group that trains a model in stages of a pipeline
train_cut_anew.py         A process of a job whose checkpoint is restored with another cut of its groups
train_with_dcp.py         A process that saves and loads by torch.distributed.checkpoint
train_with_torchtitan.py  The same by torchtitan's own classes, without servers
train_on_device.py        One member of a group whose members share a GPU
train_with_state.py       Dropout, BatchNorm, shuffling, schedulers, noise: all that decides how a run ends
train_two_stages.py       Two stages, each with an optimizer of its own
train_with_frameworks.py  Trains with each framework under a launcher, in sync and in async
train_tables.py           Two tables and a layer, each rank with its part of every batch
assign_rows.py            Pretrained rows in ddp, and rows that each rank sets later
zero_gradients.py         Gradients of a table, zeroed in every way between two backwards
train_on_slurm.py         What jobs under Slurm run: each step's samples in a file, and a pause in each step
train_on_ray.py           What a worker on Ray runs: it says how far it is, until a file says that it is enough
validate_and_stop.py      Validation over all workers, ReduceLROnPlateau, early stopping
huggingface_jobs.py       One function a test of the Trainer and of Accelerate: a worker's script
accelerate_alone.py       Loaders that Accelerate alone prepares, or the session before it; trackers
lightning_jobs.py         One function a test of Lightning and Fabric: a worker's script
lightning_groups.py       The same for members of groups, whose strategy is Lightning's ModelParallelStrategy
lightning_restarted.py    A member of such a group, which ends once and is started again
accelerate_groups.py      The same for members of groups, whose model Accelerate's FSDP2 plugin has cut
count_steps.py            Each step adds 1 to every weight and row: whether any is lost, or counts in part
few_threads.py            Runs a command whose user may have few threads
models.py                 The model of the equivalence tests, which has one of everything; weights as numbers, refusals
"""
