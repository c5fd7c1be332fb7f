"""A frozen model gives what the model gives, and needs nothing but torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ps_worker
from ps_protocol.errors import InvalidRequest, Unsupported
from ps_worker.tables.frozen import FrozenEmbedding, FrozenEmbeddingBag
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, in_parallel
from tests.tools.table_model import ITEMS, TableModel, train

MOST, LEAST = 2**63 - 1, -(2**63)
IDS = torch.tensor([5, -7, LEAST, 5, MOST, 0, 2**40, MOST - 1, -7, 5])  # all that is trained, some of it twice


class Model(nn.Module):
    """A table, and one in bags."""

    def __init__(self, mode: str = "mean", include_last_offset: bool = False) -> None:
        super().__init__()
        self.item = ps_worker.Embedding(4)
        self.tags = ps_worker.EmbeddingBag(4, mode, include_last_offset=include_last_offset)
        self.top = nn.Linear(8, 1)

    def forward(
        self, item: torch.Tensor, tags: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.top(torch.cat([self.item(item), self.tags(tags, offsets, weights)], 1))  # type: ignore[no-any-return]


class Weighted(Model):
    """The same, always with weights."""

    def forward(  # type: ignore[override]
        self, item: torch.Tensor, tags: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return self.top(torch.cat([self.item(item), self.tags(tags, offsets, weights)], 1))  # type: ignore[no-any-return]


def trained(model: Model) -> Model:
    """The model after a step with all of IDS."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    (model.item(IDS).square().sum() + model.tags(IDS[:, None]).square().sum()).backward()
    optimizer.step()
    return model


def assert_bits(one: torch.Tensor, other: torch.Tensor) -> None:
    assert one.dtype == other.dtype
    assert torch.equal(one, other), (one, other)


# -- the same outputs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("shape", [(), (0,), (6,), (2, 3), (2, 0), (3, 1, 2)])
def test_an_embedding_gives_the_same_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    table = trained(Model()).item
    frozen = ps_worker.freeze(table)
    known = IDS[IDS.abs() < 2**31] if dtype == torch.int32 else IDS
    ids = known[torch.randint(len(known), shape)].to(dtype)
    assert_bits(frozen(ids), table(ids).detach())
    assert_bits(frozen(IDS.view(2, 5).T), table(IDS.view(2, 5).T).detach())


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("include_last_offset", [True, False])
@pytest.mark.parametrize("offsets", [[0], [0, 3, 3, 7], [0, 0, 10, 10], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
def test_bags_with_offsets_give_the_same(mode: str, include_last_offset: bool, offsets: list[int]) -> None:
    model = trained(Model(mode, include_last_offset))
    frozen = ps_worker.freeze(model)
    starts = torch.tensor([*offsets, len(IDS)] if include_last_offset else offsets)
    item = IDS[: len(offsets)]
    torch.testing.assert_close(frozen(item, IDS, starts), model(item, IDS, starts), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(frozen.tags(IDS, starts), model.tags(IDS, starts), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_equal_length_give_the_same(mode: str) -> None:
    model = trained(Model(mode))
    frozen = ps_worker.freeze(model)
    for ids in (IDS.view(5, 2), IDS.view(2, 5), IDS[:0].view(0, 3), IDS.view(1, 10)):
        torch.testing.assert_close(frozen.tags(ids), model.tags(ids), rtol=1e-6, atol=1e-6)


def test_weights_of_samples_count() -> None:
    model = trained(Model("sum"))
    frozen = ps_worker.freeze(model)
    offsets, weights = torch.tensor([0, 4, 4]), torch.rand(len(IDS)) - 0.5
    found, expected = frozen.tags(IDS, offsets, weights), model.tags(IDS, offsets, weights)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(found, frozen.tags(IDS, offsets))
    bags = frozen.tags(IDS.view(5, 2), per_sample_weights=weights.view(5, 2))
    torch.testing.assert_close(bags, model.tags(IDS.view(5, 2), None, weights.view(5, 2)), rtol=1e-6, atol=1e-6)


def test_rows_are_in_the_order_of_their_ids_in_a_plain_module() -> None:
    model = trained(Model())
    frozen = ps_worker.freeze(model)
    ids = IDS.unique()
    assert type(frozen.item.table) is nn.Embedding
    assert type(frozen.tags.table) is nn.EmbeddingBag
    assert_bits(frozen.item.places.ids, torch.cat([ids, torch.tensor([MOST])]))
    assert_bits(frozen.item.table.weight[:-1].detach(), model.item.rows(ids))
    assert {name: tuple(each.shape) for name, each in frozen.state_dict().items() if "top" not in name} == {
        "item.places.ids": (8,),
        "item.table.weight": (8, 4),
        "tags.places.ids": (8,),
        "tags.table.weight": (8, 4),
    }


# -- unknown ids -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [[], [MOST], [LEAST], [0], [-1, 1], [LEAST, MOST], [MOST - 1]])
def test_an_id_without_a_row_gets_zeros_and_no_other_does(known: list[int]) -> None:
    table = ps_worker.Embedding(3)
    if known:
        table(torch.tensor(known)).sum().backward()
        torch.optim.SGD(table.parameters(), lr=1.0).step()
    frozen = ps_worker.freeze(table)
    for number in (LEAST, LEAST + 1, -2, -1, 0, 1, 2, 2**40, MOST - 1, MOST):
        ids = torch.tensor([number])
        expected = table.rows(ids) if number in known else torch.zeros(1, 3)
        assert_bits(frozen(ids), expected)
        assert number not in known or bool(expected.any())


def test_a_constant_first_value_is_that_of_unknown_ids_too() -> None:
    table = ps_worker.EmbeddingBag(3, "sum", initial="constant", scale=0.25)
    table(torch.tensor([[1, 2]])).sum().backward()
    torch.optim.SGD(table.parameters(), lr=1.0).step()
    frozen = ps_worker.freeze(table)
    ids = torch.tensor([[1, 99], [-5, 2**50], [2, 2]])
    assert_bits(frozen(ids), table(ids).detach())


def test_the_row_of_unknown_ids_can_be_changed_and_counts_in_a_bag() -> None:
    frozen = ps_worker.freeze(trained(Model()))
    with torch.no_grad():
        frozen.tags.table.weight[-1] = 6.0
    known = frozen.tags(torch.tensor([[5]]))
    torch.testing.assert_close(frozen.tags(torch.tensor([[5, 99]])), (known + 6.0) / 2)


def test_ids_that_are_not_admitted_yet_are_unknown() -> None:
    table = ps_worker.Embedding(3, admit_after=2)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    table(torch.tensor([1, 1, 2])).sum().backward()
    optimizer.step()
    frozen = ps_worker.freeze(table)
    assert frozen.places.ids.tolist() == [1, MOST]
    assert frozen(torch.tensor([2])).tolist() == [[0.0, 0.0, 0.0]]


def test_a_model_that_was_never_trained_is_frozen_too() -> None:
    frozen = ps_worker.freeze(Model())
    assert frozen.tags(IDS, torch.tensor([0, 0, 3])).tolist() == torch.zeros(3, 4).tolist()
    assert frozen.item(IDS).tolist() == torch.zeros(10, 4).tolist()


# -- a copy ------------------------------------------------------------------------------------------------------------


def test_it_is_a_copy_in_eval_mode_and_the_model_trains_on() -> None:
    model = trained(Model())
    frozen = ps_worker.freeze(model)
    before = frozen.item(IDS)
    assert model.training
    assert not any(module.training for module in frozen.modules())
    assert not any(frozen.get_submodule(name).weight.requires_grad for name in ("item.table", "tags.table"))  # type: ignore[union-attr]
    assert frozen.top.weight.data_ptr() != model.top.weight.data_ptr()
    assert isinstance(model.item, ps_worker.Embedding)
    trained(model)
    assert_bits(frozen.item(IDS), before)
    assert not torch.equal(model.item(IDS), before)


def test_a_module_that_is_used_twice_stays_one_and_tables_in_lists_are_found() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each = nn.ModuleList([ps_worker.Embedding(2), ps_worker.EmbeddingBag(2)])
            self.again = self.each[0]

    frozen = ps_worker.freeze(Shared())
    assert isinstance(frozen.each[0], FrozenEmbedding)
    assert isinstance(frozen.each[1], FrozenEmbeddingBag)
    assert frozen.again is frozen.each[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_rows_have_the_type_of_the_model(dtype: torch.dtype) -> None:
    model = trained(Model()).to(dtype)
    frozen = ps_worker.freeze(model)
    assert_bits(frozen.item(IDS), model.item(IDS).detach())
    assert frozen(IDS, IDS, torch.arange(10)).dtype == dtype


def test_a_model_without_tables_is_copied() -> None:
    model = nn.Linear(2, 3)
    frozen = ps_worker.freeze(model)
    assert frozen is not model
    assert_bits(frozen.weight.detach(), model.weight.detach())


def test_what_cannot_be_frozen_is_refused() -> None:
    class Own(ps_worker.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    class Named(ps_worker.Embedding):
        pass

    with pytest.raises(Unsupported, match=r"^1: Own has a forward of its own"):
        ps_worker.freeze(nn.Sequential(nn.ReLU(), Own(3)))
    assert isinstance(ps_worker.freeze(Named(3)), FrozenEmbedding)
    with pytest.raises(InvalidRequest, match="freeze takes a model, got dict"):
        ps_worker.freeze({})  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [torch.tensor([1.0]), torch.tensor([True]), torch.tensor([1], dtype=torch.int16)])
def test_what_are_no_ids_is_refused(ids: torch.Tensor) -> None:
    frozen = ps_worker.freeze(ps_worker.Embedding(3))
    with pytest.raises(TypeError, match="ids are a tensor of int64 or int32"):
        frozen(ids)


# -- without this package ----------------------------------------------------------------------------------------------

READER = """
import sys
import torch
kind, path, inputs, expected = sys.argv[1:]
model = torch.jit.load(path) if kind == "script" else torch.export.load(path).module()
found = model(*torch.load(inputs))
assert torch.equal(found, torch.load(expected)), found
assert not [name for name in sys.modules if name.startswith("ps_")], "it was not imported"
"""


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit's
@pytest.mark.parametrize("kind", ["export", "script"])
def test_what_torch_saves_of_it_runs_without_this_package(kind: str, tmp_path: Path) -> None:
    frozen = ps_worker.freeze(trained(Weighted("sum")))
    path = tmp_path / f"model.{'pt2' if kind == 'export' else 'pt'}"
    batch, tags = torch.export.Dim("batch"), torch.export.Dim("tags")
    # Sizes that are alike in an example are taken for one size, and a view is taken for one in every call.
    example = (IDS[:4].clone(), IDS, torch.arange(4), torch.rand(10))
    if kind == "export":
        shapes = ({0: batch}, {0: tags}, {0: batch}, {0: tags})
        torch.export.save(torch.export.export(frozen, example, dynamic_shapes=shapes), path)
    else:
        torch.jit.save(torch.jit.script(frozen), path)
    inputs = (torch.tensor([5, 99]), torch.tensor([0, -7, 12, MOST, LEAST]), torch.tensor([0, 3]), torch.rand(5))
    torch.save(inputs, tmp_path / "inputs")
    torch.save(frozen(*inputs), tmp_path / "expected")
    words = [kind, str(path), str(tmp_path / "inputs"), str(tmp_path / "expected")]
    done = subprocess.run([sys.executable, "-c", READER, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_it_compiles_in_one_graph_where_the_model_does_not() -> None:
    frozen = ps_worker.freeze(trained(Model()))
    compiled = torch.compile(frozen, fullgraph=True, backend="eager")
    assert_bits(compiled(IDS, IDS, torch.arange(10)), frozen(IDS, IDS, torch.arange(10)))


# -- in every mode -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_what_prepare_made_of_the_model_in_ddp_is_frozen() -> None:
    with ps_worker.connect(mode="ddp") as session:
        own = Model()
        model, optimizer = session.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1))
        model(IDS, IDS, torch.arange(10)).sum().backward()
        optimizer.step()
        frozen = ps_worker.freeze(model)
        assert type(frozen) is Model
        assert_bits(frozen.item(IDS), own.item(IDS).detach())


@pytest.mark.parametrize("mode", cases(["sync", "async"], ["ssp:2"]))
def test_tables_on_servers_are_fetched(cluster: Cluster, mode: str) -> None:
    def work(rank: int) -> tuple[nn.Module, int]:
        torch.manual_seed(0)
        with cluster.connect(mode, rank, 2) as session:
            own = TableModel()
            train(session, own)
            session.barrier()
            frozen = ps_worker.freeze(own)  # each worker may, or one alone
            ids = frozen.item.places.ids[:-1]
            assert_bits(frozen.item(ids), own.item.rows(ids))
            ids = frozen.tags.places.ids[:-1]
            torch.testing.assert_close(frozen.tags(ids[:, None]), own.tags.rows(ids))
            assert_bits(frozen.top.weight.detach(), own.top.weight.detach())
            session.barrier()
            return frozen, len(own.item)

    (one, count), (other, _) = in_parallel(2, work)
    assert len(one.item.table.weight) == count + 1 > 40
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]) or (mode != "sync" and name.startswith("top")), name
    assert one.item(ITEMS).any(), "the session is closed, and the copy is there"
