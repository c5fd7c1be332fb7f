"""Embedding and EmbeddingBag: torch's modules, whose ids are any 64-bit numbers and whose rows are in a table.

A module has one parameter, `weight`, of shape [0, dim]: a handle. So `model.parameters()`, parameter groups, schedulers
and `state_dict()` work as they do; the handle's group is the optimizer of the rows, unless the module has its own. What
`state_dict()` has besides is the rows, as bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import safetensors.torch
import torch
from torch import nn
from torch.nn import functional

from ps_protocol.errors import InvalidRequest
from ps_protocol.tables import Initializer, TableSpec, validate_table
from ps_worker.tables.lookups import Lookups, expanded
from ps_worker.tables.optimizers import TableOptimizer


@dataclass(frozen=True)
class TableSettings:
    """What a module asks of its table; see Embedding."""

    optimizer: TableOptimizer | None = None
    initial: str = "normal"
    scale: float = 1.0
    seed: int | None = None
    admit_after: int = 0
    expire_after: int = 0
    max_rows: int = 0
    lazy_decay: bool = False

    def spec(self, name: str, dim: int) -> TableSpec:
        """Returns the table of a module of that name. Raises InvalidRequest for settings that no table can have."""
        seed = self.seed
        if seed is None:  # or an id would begin alike in all tables
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        spec = TableSpec(
            name,
            dim,
            Initializer(self.initial, self.scale, seed),
            self.admit_after,
            self.expire_after,
            self.max_rows,
        )
        validate_table(spec)
        return spec


class Embedding(nn.Module):
    """As torch's nn.Embedding, without a number of embeddings: an id is any int64, and its row comes with training.

    The modes single and ddp train it; sync, ssp and async refuse a model with it so far.

    dim:          elements of a row, float32
    optimizer:    of the rows: ps_worker.RowWiseAdagrad or ps_worker.Ftrl; by default that of the handle's group,
                  lazily: a step moves the rows of its batch, and no others
    initial, scale, seed: how a row begins: "normal" with this standard deviation, "uniform" in [-scale, scale), or the
                  scale itself as a "constant"; the seed is by default made from the module's name. An id that training
                  has not seen has this value, also in evaluation; looking it up makes no row
    admit_after:  an id becomes a row with the step in which it has occurred so often; 0 and 1: at once
    expire_after: a row is forgotten when so many steps have not trained it; 0: never
    max_rows:     beyond, the rows trained longest ago are forgotten; 0: as many as fit into memory
    lazy_decay:   the optimizer may have a weight_decay, though a row then decays only in the steps that have it

    Clipping the norm of `model.parameters()` does not see rows: it sees the handle, which has no element.
    """

    def __init__(
        self,
        dim: int,
        *,
        optimizer: TableOptimizer | None = None,
        initial: str = "normal",
        scale: float = 1.0,
        seed: int | None = None,
        admit_after: int = 0,
        expire_after: int = 0,
        max_rows: int = 0,
        lazy_decay: bool = False,
    ) -> None:
        super().__init__()
        self.settings = TableSettings(optimizer, initial, scale, seed, admit_after, expire_after, max_rows, lazy_decay)
        self.name = ""  # in the model, once it is prepared
        self.settings.spec(self.name, dim)
        self.weight = nn.Parameter(torch.empty(0, dim))
        self.lookups = Lookups(self.weight)
        self.loaded = b""  # rows of a state_dict that came before `prepare`: a safetensors file

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns rows: [...] int64 or int32, to [..., dim]."""
        rows, places = self._find(ids)
        return expanded(rows, places)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns rows as they are now, apart from any training: [...] to [..., dim]."""
        with torch.no_grad():
            rows, places = self._find(ids)
            return rows[places]

    def get_extra_state(self) -> torch.Tensor:
        """Returns what `state_dict` has of the table beside its handle: all rows, as bytes of a safetensors file."""
        source = self.lookups.source
        content = self.loaded if source is None else safetensors.torch.save(source.snapshot())
        return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Has the rows of a `state_dict`, now or with `prepare`. Raises InvalidRequest if they fit no such table."""
        content = state.cpu().numpy().tobytes()
        if self.lookups.source is None:
            self.loaded = content
        elif content:
            self.lookups.source.load(safetensors.torch.load(content))

    def __len__(self) -> int:
        """How many rows the table has."""
        return 0 if self.lookups.source is None else len(self.lookups.source)

    def __bool__(self) -> bool:
        return True  # also without a row

    def extra_repr(self) -> str:
        """Describes it in the model's text."""
        usual = asdict(TableSettings())
        changed = [f"{name}={value!r}" for name, value in vars(self.settings).items() if value != usual[name]]
        return ", ".join([str(self.weight.shape[1]), *changed])

    def _find(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.lookups.handle = self.weight  # another one since a copy, or `.to(device)`
        return self.lookups.find(ids, self.name or type(self).__name__)


class EmbeddingBag(Embedding):
    """As torch's nn.EmbeddingBag, without a number of embeddings; see Embedding for the table.

    mode: how the rows of a bag become one: "sum", "mean" or "max"
    include_last_offset: offsets have the end of the last bag, too
    """

    def __init__(
        self,
        dim: int,
        mode: str = "mean",
        *,
        include_last_offset: bool = False,
        optimizer: TableOptimizer | None = None,
        initial: str = "normal",
        scale: float = 1.0,
        seed: int | None = None,
        admit_after: int = 0,
        expire_after: int = 0,
        max_rows: int = 0,
        lazy_decay: bool = False,
    ) -> None:
        if mode not in ("sum", "mean", "max"):
            raise InvalidRequest(f"mode must be sum, mean or max, got {mode!r}")
        super().__init__(
            dim,
            optimizer=optimizer,
            initial=initial,
            scale=scale,
            seed=seed,
            admit_after=admit_after,
            expire_after=expire_after,
            max_rows=max_rows,
            lazy_decay=lazy_decay,
        )
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns one row a bag: [bags, n] ids, or [n] ids and [bags] offsets, to [bags, dim].

        per_sample_weights: shaped as ids, for mode "sum"
        """
        rows, places = self._find(ids)
        if not len(rows):  # torch wants one row at least, also where all bags are empty
            rows = rows.new_zeros(1, rows.shape[1])
        return functional.embedding_bag(
            places,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
        )


def named_tables(models: Sequence[nn.Module]) -> dict[str, Embedding]:
    """Returns the tables of some models by name: that of the module in the model, of several models with the model's
    number in front, as parameters are named."""
    found: dict[str, Embedding] = {}
    for number, model in enumerate(models):
        for name, module in model.named_modules():
            if isinstance(module, Embedding):
                found[f"{number}.{name}" if len(models) > 1 else name or "table"] = module
    return found
