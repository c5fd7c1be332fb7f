"""What docs/training.md says of random numbers: alike on all workers, until the script seeds them by rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.launching import run, script

AUGMENTED = """
import torch
import ps_worker
from torch.utils.data import DataLoader, Dataset

class Augmented(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.rand(1)  # as a random crop draws

torch.manual_seed(0)
session = ps_worker.connect()
model = torch.nn.Linear(1, 1)
loaders = [DataLoader(Augmented(), batch_size=2, shuffle=True, num_workers=count) for count in (0, 1)]
model, optimizer, *loaders = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), *loaders)

def equal(loader):
    mine = [value for batch in loader for value in batch[:, 0].tolist()]
    first, second = session.gather(mine)
    return sum(one == other for one, other in zip(first, second))

alike = [equal(loader) for loader in loaders]
torch.manual_seed(0 + session.rank)
say(*alike, *(equal(loader) for loader in loaders))
"""


@pytest.mark.long
def test_a_seed_by_rank_after_prepare_gives_each_worker_numbers_of_its_own(tmp_path: Path) -> None:
    """Whether the worker loads its samples itself, or a process of its loader does."""
    done = run("--shards", "1", "--workers", "2", script(tmp_path, AUGMENTED))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 4 4 0 0", "[1] 4 4 0 0"]
