"""Groups whose members share a GPU, over gloo: they end where one process on that GPU ends. Needs a CUDA device.

NCCL refuses two ranks on one GPU. The same with tensors of the CPU is a further case, so that the script stays right
where there is no GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.scripts.train_on_device import Options, one_process
from tests.tools.cluster import Cluster
from tests.tools.forkserver import Nursery
from tests.tools.groups import begun_and_ended, relative_distance, same

DEVICES = [
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
    ),
    pytest.param("cpu", marks=pytest.mark.repeat),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize(("transport", "overlap"), [("shm", False), ("tcp", False), ("tcp", True)])
def test_two_groups_of_two_on_one_device_end_as_one_process_and_alike_to_the_bit(
    nursery: Nursery,
    shared: Cluster,
    job: str,
    tmp_path: Path,
    device: str,
    optimizer: str,
    transport: str,
    overlap: bool,
) -> None:
    """With accumulation. Group 1 begins with other weights, and is given group 0's."""
    options = Options(device, transport, overlap, optimizer)
    begin, end = begun_and_ended(nursery, shared.address, job, tmp_path, options)
    assert not same(begin, end)
    tolerance = 1e-5 if device == "cuda" else 1e-6  # kernels of GPUs sum in an order that depends on the batch
    assert relative_distance(end, one_process(options)) <= tolerance
