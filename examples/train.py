"""The smallest complete script: a classifier of points, in one process, with DDP, or on a parameter server.

    python examples/train.py
    ps-server up --shards 2 & ps-worker run --server 127.0.0.1:50051 --workers 2 --mode sync examples/train.py

README.md shows all that follows.
"""

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ps_torch as ps

torch.manual_seed(0)
points = 2 * torch.rand(4096, 2) - 1
inside = (points.norm(dim=1) < 0.7).long()  # the label: is the point inside the circle?
loader = DataLoader(TensorDataset(points, inside), batch_size=64, shuffle=True)
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

session = ps.connect()  # finds the server, the mode and the rank in the environment
model, optimizer, loader = session.prepare(model, optimizer, loader)
session.progress(total=5 * len(loader))  # steps of this worker: the page says how many are left, and how long they take

for epoch in range(5):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()  # pushes gradients, pulls weights; waits only if the mode says so
        optimizer.zero_grad()
        session.log(loss=loss)  # the page and `ps-server status --watch` show it
    mean = session.mean(loss.item())  # over all workers
    if session.is_main:
        print(f"epoch {epoch}: loss {mean:.3f}")
session.barrier()  # all workers have made their last step
if session.is_main:
    save_file(session.global_weights(), "model.safetensors")
