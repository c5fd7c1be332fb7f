"""Embedding and EmbeddingBag are torch's, in a script that trains in one process."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ps_worker
from ps_protocol.errors import InvalidRequest, Unsupported
from ps_worker.tables.lookups import expanded
from ps_worker.tables.own_rows import LocalRows

IDS = 100  # of those that are known to torch's modules
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


class Model(nn.Module):
    """Two tables, one of them in bags, and a layer above them."""

    def __init__(self, item: nn.Module, tags: nn.Module, weighted: nn.Module) -> None:
        super().__init__()
        self.item, self.tags, self.weighted = item, tags, weighted
        self.top = nn.Linear(12, 1)

    def forward(self, item: torch.Tensor, tags: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor) -> Any:
        twice = self.item(item) + self.item(item.flip(0))
        rows = [twice, self.tags(tags, offsets), self.weighted(tags, offsets, weights)]
        return self.top(torch.cat(rows, 1)).squeeze(1)


def batches(count: int, scale: int = 1) -> Iterator[tuple[torch.Tensor, ...]]:
    random = torch.Generator().manual_seed(5)
    for _ in range(count):
        item, tags = (torch.randint(0, IDS, (n,), generator=random) * scale for n in (20, 60))
        offsets, weights = torch.arange(0, 60, 3), torch.rand(60, generator=random)
        yield item, tags, offsets, weights, torch.rand(20, generator=random)


@pytest.fixture
def session() -> Iterator[ps_worker.Session]:
    with ps_worker.connect(mode="single") as session:
        yield session


def ours_and_theirs(mode: str = "mean") -> tuple[Model, Model]:
    ours = Model(ps_worker.Embedding(4), ps_worker.EmbeddingBag(4, mode), ps_worker.EmbeddingBag(4, "sum"))
    theirs = Model(
        nn.Embedding(IDS, 4, sparse=mode != "max"),
        nn.EmbeddingBag(IDS, 4, mode=mode, sparse=mode != "max"),
        nn.EmbeddingBag(IDS, 4, mode="sum", sparse=mode != "max"),
    )
    theirs.top.load_state_dict(ours.top.state_dict())
    for name in ("item", "tags", "weighted"):
        theirs.get_submodule(name).weight.data = ours.get_submodule(name).rows(torch.arange(IDS))  # type: ignore[operator]
    return ours, theirs


def trains(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    *inputs, wanted = batch
    optimizer.zero_grad()
    loss = (model(*inputs) - wanted).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def assert_alike(ours: Model, theirs: Model, difference: float = 3e-6) -> None:
    """Torch sums gradients in an order that depends on the processor.

    Rows that Adagrad has stepped differ by up to 1.3e-6 with AVX2 and AVX-512, five units in the last place of their
    largest element, and by less than 1e-6 without these.
    """
    for name in ("item", "tags", "weighted"):
        rows = ours.get_submodule(name).rows(torch.arange(IDS))  # type: ignore[operator]
        assert float((rows - theirs.get_submodule(name).weight.detach()).abs().max()) < difference
    assert torch.allclose(ours.top.weight, theirs.top.weight, atol=difference)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
def test_the_loop_as_it_was_trains_as_with_torchs_own_modules(
    session: ps_worker.Session, mode: str, optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    ours, theirs = ours_and_theirs(mode)
    reference = optimizer(theirs.parameters(), lr=0.1)
    prepared, stepper = session.prepare(ours, optimizer(ours.parameters(), lr=0.1))
    schedules = [torch.optim.lr_scheduler.StepLR(each, 5, 0.5) for each in (reference, stepper)]
    for batch in batches(15):
        assert torch.allclose(trains(prepared, stepper, batch), trains(theirs, reference, batch), rtol=1e-5)
        for schedule in schedules:
            schedule.step()
    assert_alike(ours, theirs)


@pytest.mark.parametrize("has_own", [True, False])
def test_a_schedule_reaches_a_table_by_its_group_and_not_its_own_optimizer(
    session: ps_worker.Session, has_own: bool
) -> None:
    """The rate becomes 0 after the first step: a table with an optimizer of its own goes on at its own rate."""
    table = ps_worker.Embedding(4, seed=1, optimizer=ps_worker.RowWiseAdagrad(0.1) if has_own else None)
    model, stepper = session.prepare(table, torch.optim.Adagrad(table.parameters(), lr=0.1))
    schedule = torch.optim.lr_scheduler.StepLR(stepper, 1, 0.0)
    ids, rows = torch.arange(3), []
    for _ in range(3):
        stepper.zero_grad()
        model(ids).sum().backward()
        stepper.step()
        schedule.step()
        rows.append(table.rows(ids).clone())
    assert torch.equal(rows[0], rows[1]) is not has_own
    assert torch.equal(rows[1], rows[2]) is not has_own


def test_arguments_may_be_numbers_of_numpy() -> None:
    def settings(whole: Any, real: Any) -> tuple[object, ...]:
        limits = {"admit_after": whole(2), "expire_after": whole(3), "max_rows": whole(7)}
        optimizer = ps_worker.RowWiseAdagrad(lr=real(0.5), eps=real(0.25))
        others = {"padding_idx": whole(1), "scale": real(0.5), "seed": whole(5), "optimizer": optimizer}
        table = ps_worker.Embedding(whole(4), **others, **limits)
        rows = table.local
        assert isinstance(rows, LocalRows)
        return repr(table.settings), repr(table.padding_idx), repr((rows.dim, rows.seed))

    assert settings(np.int64, np.float32) == settings(int, float)
    with pytest.raises(InvalidRequest, match="padding_idx must be an id of 64 bits"):
        ps_worker.Embedding(4, padding_idx=np.float32(1))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own calls, and of where its graphs end
def test_a_compiled_model_trains_as_one_that_is_not(session: ps_worker.Session) -> None:
    torch._dynamo.reset()
    ours, plain = (
        Model(
            ps_worker.Embedding(4, seed=1), ps_worker.EmbeddingBag(4, seed=2), ps_worker.EmbeddingBag(4, "sum", seed=3)
        )
        for _ in range(2)
    )
    plain.top.load_state_dict(ours.top.state_dict())
    graphs: list[torch.fx.GraphModule] = []

    def compiled(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    model, stepper = session.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    faster = torch.compile(model, backend=compiled)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in batches(4):
        assert torch.equal(trains(faster, stepper, batch), trains(plain, reference, batch))
    assert graphs, "nothing was compiled"


def test_a_table_has_an_optimizer_of_its_own(session: ps_worker.Session) -> None:
    model = nn.Sequential(ps_worker.Embedding(4, optimizer=ps_worker.RowWiseAdagrad(lr=0.5)))
    optimizer = torch.optim.AdamW(model.parameters())
    session.prepare(model, optimizer)
    before = model[0].rows(torch.tensor([7]))
    model(torch.tensor([7])).sum().backward()
    optimizer.step()
    assert torch.allclose(model[0].rows(torch.tensor([7])), before - 0.5)


def test_any_number_is_an_id_and_an_evaluation_makes_no_row(session: ps_worker.Session) -> None:
    table = ps_worker.Embedding(4, initial="uniform", scale=0.01)
    model, optimizer = session.prepare(nn.Sequential(table), torch.optim.SGD(table.parameters(), lr=1.0))
    ids = torch.tensor([[0, -1], [2**63 - 1, -(2**63)], [5, 5]])
    assert len(table) == 0
    with torch.no_grad():
        before = model(ids)
    assert (before.shape, len(table), bool(table)) == ((3, 2, 4), 0, True)
    model(ids).sum().backward()
    optimizer.step()
    assert len(table) == 5
    model.eval()
    after = model(torch.cat([ids, torch.tensor([[8, 9]])]))  # with gradients on, and never a backward
    assert len(table) == 5
    expected = before - torch.tensor([1.0, 1.0, 2.0])[:, None, None]  # 5 occurs twice
    assert torch.allclose(after[:3], expected)
    optimizer.step()
    assert torch.equal(model(ids), after[:3]), "and a step without a gradient changes nothing"


def loss_of(model: nn.Module, *ids: int) -> torch.Tensor:
    return model(torch.tensor(ids)).sum()  # type: ignore[no-any-return]


def test_a_graph_that_is_kept_over_a_step_has_only_the_gradients_of_its_next_backward(
    session: ps_worker.Session,
) -> None:
    table = ps_worker.Embedding(4, initial="constant", scale=0.0)
    model, optimizer = session.prepare(nn.Sequential(table), torch.optim.SGD(table.parameters(), lr=1.0))
    rows = model(torch.tensor([1]))
    for column in (0, 1):
        optimizer.zero_grad()
        rows[:, column].sum().backward(retain_graph=True)
        optimizer.step()
    assert table.rows(torch.tensor([1]))[0].tolist() == [-1.0, -1.0, 0.0, 0.0]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_batch_without_any_id_is_trained_as_any_other(session: ps_worker.Session, mode: str) -> None:
    bag = ps_worker.EmbeddingBag(4, mode)
    _, optimizer = session.prepare(nn.ModuleList([bag]), torch.optim.SGD(bag.parameters(), lr=1.0))
    out = bag(torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0]))
    assert torch.equal(out, torch.zeros(2, 4))
    out.sum().backward()
    assert bag.weight.grad is not None, "ddp waits for it"
    optimizer.step()
    assert len(bag) == 0


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_the_bits_of_a_bags_rows_depend_on_no_other_ids_of_the_batch(session: ps_worker.Session, mode: str) -> None:
    random = torch.Generator().manual_seed(1)
    own, gradients = torch.randint(0, 5, (64, 3), generator=random), torch.randn(64, 4, generator=random)
    found = []
    for others in (0, 200):
        bag = ps_worker.EmbeddingBag(4, mode, seed=1)
        optimizer = torch.optim.SGD(bag.parameters(), lr=1.0)
        more = torch.randint(100, 1_000, (others, 3), generator=random)
        before = others // 3
        bag(torch.cat([more[:before], own, more[before:]]))[before : before + 64].backward(gradients)
        optimizer.step()
        found.append(bag.rows(torch.arange(5)))
    assert torch.equal(*found)


def test_another_default_type_changes_nothing(session: ps_worker.Session) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model = nn.Sequential(ps_worker.Embedding(4, seed=1), nn.Linear(4, 1))
        prepared, optimizer = session.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
        assert prepared(torch.tensor([1])).dtype == torch.float64
        loss_of(prepared, 1).backward()
        optimizer.step()
        assert len(model[0]) == 1
    finally:
        torch.set_default_dtype(torch.float32)


def test_any_seed_of_64_bits_is_kept() -> None:
    for seed in (0, 2**63, 2**64 - 1):
        table = ps_worker.Embedding(4, seed=seed)
        copied = copy.deepcopy(table)
        assert copied.local.seed == seed
        assert torch.equal(copied.rows(torch.arange(9)), table.rows(torch.arange(9)))


def test_a_module_of_two_models_is_one_table(session: ps_worker.Session) -> None:
    shared = ps_worker.Embedding(4, initial="constant", scale=0.0)
    models = nn.Sequential(shared), nn.Sequential(shared, nn.Linear(4, 1))
    optimizer = torch.optim.SGD({each for model in models for each in model.parameters()}, lr=1.0)
    first, *_ = session.prepare(*models, optimizer)
    loss_of(first, 1).backward()
    optimizer.step()
    assert shared.rows(torch.tensor([1]))[0, 0] == -1.0


@pytest.mark.parametrize("by", ["optimizer", "model"])
def test_gradients_add_up_until_the_step_and_zero_grad_takes_them_away(session: ps_worker.Session, by: str) -> None:
    table = ps_worker.Embedding(4, initial="constant", scale=0.0)
    model, optimizer = session.prepare(nn.Sequential(table), torch.optim.SGD(table.parameters(), lr=1.0))
    loss_of(model, 1, 2).backward()
    (optimizer if by == "optimizer" else model).zero_grad()
    loss_of(model, 2, 3).backward()
    (2 * loss_of(model, 3)).backward()
    optimizer.step()
    optimizer.step()  # what it had is used up
    assert table.rows(torch.tensor([1, 2, 3]))[:, 0].tolist() == [0.0, -1.0, -3.0]
    loss_of(model, 1).backward()
    (optimizer if by == "optimizer" else model).zero_grad()
    optimizer.step()
    assert table.rows(torch.tensor([1]))[0, 0] == 0.0
    late = loss_of(model, 2)
    loss_of(model, 1).backward()
    (optimizer if by == "optimizer" else model).zero_grad()
    late.backward()
    optimizer.step()
    assert table.rows(torch.tensor([1, 2]))[:, 0].tolist() == [0.0, -2.0]
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]


def test_hyper_parameters_count_that_came_after_a_state_was_loaded(session: ps_worker.Session) -> None:
    """Which makes the optimizer's groups anew."""
    table = ps_worker.Embedding(4, initial="constant", scale=0.0)
    model, optimizer = session.prepare(nn.Sequential(table), torch.optim.SGD(table.parameters(), lr=1.0))
    loss_of(model, 1).backward()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.step()
    optimizer.zero_grad()
    assert table.rows(torch.tensor([1]))[0, 0] == -0.25
    optimizer.param_groups[0]["weight_decay"] = 0.1
    loss_of(model, 1).backward()
    with pytest.raises(InvalidRequest, match=r"0: weight_decay is 0.1, .* say lazy_decay=True"):
        optimizer.step()
    optimizer.param_groups[0].update(weight_decay=0.0, momentum=0.9)
    optimizer.step()
    assert table.rows(torch.tensor([1]))[0, 0] == -0.5, "the gradient was not lost"
    optimizer.step()
    assert table.rows(torch.tensor([1]))[0, 0] == -0.5, "and counts once"
    loss_of(model, 1).backward()
    optimizer.step()
    assert table.rows(torch.tensor([1]))[0, 0] == pytest.approx(-0.5 - 0.25 * 1.9), "momentum from then on"


def test_a_closure_makes_the_gradients_of_its_step_and_is_called_once(session: ps_worker.Session) -> None:
    table = ps_worker.Embedding(4, initial="constant", scale=0.0)
    model, optimizer = session.prepare(nn.Sequential(table), torch.optim.SGD(table.parameters(), lr=1.0))
    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = loss_of(model, 4)
        loss.backward()
        return loss

    assert optimizer.step(closure) == 0.0
    assert optimizer.step(closure=closure) == -4.0
    assert (len(calls), table.rows(torch.tensor([4]))[0, 0]) == (2, -2.0)


@pytest.mark.parametrize("fused", [False, True])
def test_scaled_gradients_are_unscaled_and_those_that_overflow_are_left_out(
    session: ps_worker.Session, fused: bool
) -> None:
    table = ps_worker.Embedding(4, initial="constant", scale=0.0)
    own = torch.optim.SGD(table.parameters(), lr=1.0, fused=fused)
    model, optimizer = session.prepare(nn.Sequential(table), own)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, 3) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert table.rows(torch.tensor([3]))[0].tolist() == [-2.0] * 4


def test_rows_are_clipped_over_the_optimizers_groups(session: ps_worker.Session) -> None:
    table = ps_worker.Embedding(4, initial="constant", scale=0.0)
    model, optimizer = session.prepare(nn.Sequential(table), torch.optim.SGD(table.parameters(), lr=1.0))
    loss_of(model, 3).backward()
    norm = torch.nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], 0.5)
    optimizer.step()
    assert (float(norm), float(table.rows(torch.tensor([3])).norm())) == pytest.approx((2.0, 0.5), rel=1e-4)


def test_a_copy_has_rows_of_its_own_and_any_optimizer_trains_them(session: ps_worker.Session) -> None:
    table = ps_worker.Embedding(4)
    model, optimizer = session.prepare(nn.Sequential(table), torch.optim.SGD(table.parameters(), lr=1.0))
    loss_of(model, 1).backward()
    optimizer.step()
    every = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    start = table.rows(torch.arange(3))
    loss_of(model, 1).backward()
    optimizer.step()
    assert not torch.equal(table.rows(torch.arange(3)), start)
    for other in every:
        assert torch.equal(other[0].rows(torch.arange(3)), start)
        own = torch.optim.SGD(other.parameters(), lr=0.5)
        loss_of(other, 2).backward()
        own.step()
        assert torch.equal(other[0].rows(torch.arange(3)), start - torch.tensor([0.0, 0.0, 0.5])[:, None])
        other.load_state_dict(model.state_dict())
        assert torch.equal(other[0].rows(torch.arange(9)), table.rows(torch.arange(9)))


def test_rows_need_no_session_and_stay_over_the_next_one() -> None:
    """Plain torch: a notebook, a test, a service that predicts."""
    model = nn.Sequential(ps_worker.Embedding(4, initial="constant", scale=0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        loss_of(model, 7).backward()
        optimizer.step()
        optimizer.zero_grad()
    for _ in range(2):
        with ps_worker.connect(mode="single") as session:
            prepared, stepper = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
            loss_of(prepared, 7).backward()
            stepper.step()
            stepper.zero_grad()
    assert model[0].rows(torch.tensor([7]))[0].tolist() == [-4.0] * 4


def test_an_optimizer_that_comes_later_trains_rows(session: ps_worker.Session) -> None:
    model = nn.Sequential(ps_worker.Embedding(4, initial="constant", scale=0.0), nn.Linear(4, 1))
    prepared, optimizer = session.prepare(model, torch.optim.SGD(model[1].parameters(), lr=1.0))
    optimizer.add_param_group({"params": list(model[0].parameters())})
    model[1].weight.data.fill_(1.0)
    loss_of(prepared, 7).backward()
    optimizer.step()
    assert model[0].rows(torch.tensor([7]))[0].tolist() == [-1.0] * 4
    model[1].weight.data.fill_(1.0)
    again = torch.optim.Adagrad(model.parameters(), lr=0.5)
    optimizer.zero_grad()
    loss_of(prepared, 7).backward()
    again.step()
    assert model[0].rows(torch.tensor([7]))[0].tolist() == [-1.5] * 4


def test_a_state_between_backward_and_step_names_no_rows_and_can_be_loaded(session: ps_worker.Session) -> None:
    table = ps_worker.Embedding(4, initial="constant", scale=0.0)
    model, optimizer = session.prepare(nn.Sequential(table), torch.optim.Adam(table.parameters(), lr=1.0))
    loss_of(model, 1).backward()
    state = optimizer.state_dict()
    assert state["param_groups"][0]["params"] == [0]
    optimizer.load_state_dict(state)
    assert len(optimizer.param_groups[0]["params"]) == 2, "and the rows are there again"
    optimizer.step()
    optimizer.load_state_dict(state)
    assert table.rows(torch.tensor([1]))[0, 0] == pytest.approx(-1.0)


def test_steps_that_train_no_row_let_none_expire(session: ps_worker.Session) -> None:
    model = nn.Sequential(ps_worker.Embedding(4, expire_after=3), nn.Linear(4, 1))
    prepared, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss_of(prepared, 1).backward()
    optimizer.step()
    model[0].requires_grad_(False)
    for _ in range(20):
        optimizer.zero_grad()
        loss_of(prepared, 1).backward()
        optimizer.step()
    assert len(model[0]) == 1


def test_gradients_that_no_optimizer_ever_uses_take_no_more_memory_than_their_sum() -> None:
    model = nn.Sequential(ps_worker.Embedding(4, initial="constant", scale=0.0))
    for _ in range(50):
        loss_of(model, 1, 2).backward()
    assert len(model[0].lookups._leaves) < 10
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert model[0].rows(torch.tensor([1, 2, 3]))[:, 0].tolist() == [-50.0, -50.0, 0.0]


@pytest.mark.parametrize("prepared_first", [False, True])
def test_a_state_dict_has_the_rows_and_training_goes_on_from_it(
    session: ps_worker.Session, prepared_first: bool
) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(ps_worker.Embedding(4, admit_after=2), nn.Linear(4, 1))
        return model, torch.optim.Adagrad(model.parameters(), lr=0.1)

    model, optimizer = session.prepare(*made())
    for _ in range(3):
        loss_of(model, 1, 1, 2).backward()
        optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    assert tuple(saved["model"]["0.weight"].shape) == (0, 4)
    again, stepper = made()
    empty = again.state_dict()
    with ps_worker.connect(mode="single", job="again") as other:
        if prepared_first:
            again, stepper = other.prepare(again, stepper)
        again.load_state_dict(saved["model"])
        assert again.state_dict()["0._extra_state"].equal(saved["model"]["0._extra_state"])
        if not prepared_first:
            again, stepper = other.prepare(again, stepper)
        stepper.load_state_dict(saved["optimizer"])
        for each, of in ((model, optimizer), (again, stepper)):
            of.zero_grad()
            loss_of(each, 1, 2, 5).backward()
            of.step()
        assert torch.equal(again[0].rows(torch.arange(9)), model[0].rows(torch.arange(9)))
        assert len(again[0]) == len(model[0]) == 2
        again.load_state_dict(empty)
        assert len(again[0]) == 0
    narrow = nn.Sequential(ps_worker.Embedding(3), nn.Linear(3, 1))
    with ps_worker.connect(mode="single", job="narrow") as third:
        third.prepare(narrow, torch.optim.SGD(narrow.parameters()))
        with pytest.raises(
            InvalidRequest, match=r"table '0': expected weights to be \(2, 3\) of torch.float32, got \(2, 4\)"
        ):
            narrow[0].set_extra_state(saved["model"]["0._extra_state"])


def test_a_table_that_no_optimizer_has_is_read_and_never_trained(session: ps_worker.Session) -> None:
    model = nn.Sequential(ps_worker.Embedding(4), nn.Linear(4, 1))
    session.prepare(model, optimizer := torch.optim.SGD(model[1].parameters(), lr=1.0))
    before = model[0].rows(torch.tensor([1]))
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert torch.equal(model[0].rows(torch.tensor([1])), before)
    assert len(model[0]) == 0


def test_tables_of_one_model_begin_unlike_and_say_what_they_are(session: ps_worker.Session) -> None:
    model = nn.ModuleDict({"a": ps_worker.Embedding(3), "b": ps_worker.EmbeddingBag(3, admit_after=2)})
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    first, second = (model[name].rows(torch.tensor([1])) for name in "ab")
    assert not torch.equal(first, second)
    assert [repr(model[name]) for name in "ab"] == ["Embedding(3)", "EmbeddingBag(3, admit_after=2)"]
    bags = model["b"](torch.tensor([], dtype=torch.int64), torch.tensor([0, 0]))
    assert torch.equal(bags, torch.zeros(2, 3)), "empty bags, and no id at all"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ps_worker.Embedding(0), "dim must be from 1 to 4096, got 0"),
        (
            lambda: ps_worker.Embedding(4, initial="constant", scale=float("nan")),
            "the scale of initial values must be finite, got nan",
        ),
        (lambda: ps_worker.Embedding(4, scale=-1.0), "initial values must be finite, and from 0 on, got -1.0"),
        (
            lambda: ps_worker.Embedding(4, initial="xavier"),
            "rows begin as one of constant, uniform, normal, got 'xavier'",
        ),
        (
            lambda: ps_worker.RowWiseAdagrad(lr=float("nan")),
            "RowWiseAdagrad: lr must be a finite number from 0, got nan",
        ),
        (lambda: ps_worker.Ftrl(lr=0.0), "Ftrl: lr must be above 0"),
        (lambda: ps_worker.Ftrl(l1=-1.0), "Ftrl: l1 must be a finite number from 0, got -1.0"),
        (lambda: ps_worker.Embedding(4, admit_after=-1), "admit_after must be from 0 to"),
        (
            lambda: ps_worker.Embedding(4, optimizer=torch.optim.SGD),
            r"optimizer must be ps_torch.RowWiseAdagrad\(...\) or",
        ),
        (lambda: ps_worker.EmbeddingBag(4, "median"), "mode must be sum, mean or max, got 'median'"),
    ],
)
def test_settings_that_no_table_can_have_are_refused_when_it_is_made(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        make()


def test_what_would_train_something_else_than_it_says_is_refused(session: ps_worker.Session) -> None:
    table = ps_worker.Embedding(4)
    model = nn.Sequential(table)
    with pytest.raises(InvalidRequest, match=r"0: weight_decay is 0.01, .* say lazy_decay=True"):
        session.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(Unsupported, match=r"0: NAdam cannot step rows; these can: SGD, "):
        session.prepare(model, torch.optim.NAdam(model.parameters()))
    tied = nn.ModuleList([table, ps_worker.Embedding(4)])
    tied[1].weight = table.weight
    with pytest.raises(InvalidRequest, match="the tables '0' and '1' share one weight"):
        session.prepare(tied, torch.optim.SGD(tied.parameters(), lr=1.0))
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(InvalidRequest, match=r"ids are a tensor of int64 or int32, got torch.float32"):
        model(torch.tensor([1.0]))
    with pytest.raises(InvalidRequest, match=r"ids are a tensor of int64 or int32, got list"):
        table.rows([1])
    with pytest.raises(InvalidRequest, match=r"a table's extra state is bytes, a tensor of uint8, got torch.float16"):
        model.load_state_dict({name: value.half() for name, value in model.state_dict().items()})
    with pytest.raises(InvalidRequest, match=r"table '0': expected rows as state_dict has them, got "):
        table.set_extra_state(torch.zeros(9, dtype=torch.uint8))
    with pytest.raises(Unsupported, match="LBFGS evaluates the loss several times a step"):
        torch.optim.LBFGS(model.parameters()).step(lambda: loss_of(model, 1))
    loss_of(model, 1).backward()
    with pytest.raises(Unsupported, match=r"optimizer Mine cannot run on a parameter server: .* of its own"):
        Mine(model.parameters(), lr=0.1).step()


class Mine(torch.optim.SGD):
    """An optimizer that shards do not know."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "dim"), [(1, 1), (7, 3), (500, 64), (40, 300)])
def test_gradients_of_a_row_are_added_up_in_the_order_of_the_batch(rows: int, dim: int, dtype: torch.dtype) -> None:
    """With the bits of torch's index_add, however often an id occurs, and however the gradient lies in memory."""
    random = torch.Generator().manual_seed(dim)
    places = torch.cat([torch.arange(rows), torch.randint(0, max(1, rows // 8), (3 * rows,), generator=random)])
    places = places[torch.randperm(len(places), generator=random)]
    each, one = torch.randn(len(places), dim, generator=random), torch.randn(dim, generator=random)
    for gradient in (each, one.expand(len(places), dim)):
        leaf = torch.zeros(rows, dim, dtype=dtype, requires_grad=True)
        expanded(leaf, places).backward(gradient.to(dtype))
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, torch.zeros(rows, dim, dtype=dtype).index_add(0, places, gradient.to(dtype)))
    nothing = torch.zeros(0, dim, requires_grad=True)
    expanded(nothing, torch.empty(0, dtype=torch.int64)).sum().backward()
    assert nothing.grad is not None
    assert nothing.grad.shape == (0, dim)


def test_a_thread_makes_tables_while_another_one_trains() -> None:
    """Each step goes through all tables and optimizers of the process."""
    kept, over, errors = [], threading.Event(), []
    interval = sys.getswitchinterval()

    def make() -> None:
        while not over.is_set():
            table = ps_worker.Embedding(2)
            optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
            optimizer.step()
            kept.append((table, optimizer))

    def train() -> None:
        try:
            table = ps_worker.Embedding(2)
            optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
            for _ in range(40):
                table(torch.arange(3)).sum().backward()
                optimizer.step()
        except RuntimeError as error:
            errors.append(error)
        finally:
            over.set()

    threads = [threading.Thread(target=work) for work in (make, train)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
