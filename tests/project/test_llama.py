"""The Llama that several processes train together: its model, its checkpoints, and groups of it on servers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.tools import launching
from tests.tools.cases import cases
from tests.tools.cluster import Cluster

SCRIPT = launching.ROOT / "examples" / "llama.py"
TINY = ("--steps=8", "--checkpoint-every=4", "--warm-up=2", "--width=32", "--hidden=48", "--block=16")
ONE = (*TINY, "--tensor-parallel=1")  # a group of one process
MANY = ("--tensor-parallel=1", "--steps=150", "--checkpoint-every=30")
UNCLIPPED = "--clip=1000"  # a group clips its own gradient, and processes without servers the mean of all

launching.load(launching.ROOT / "examples" / "char_gpt.py")  # which the script imports by that name
llama = launching.load(SCRIPT)
SHAPE = llama.LlamaShape(layers=2, width=32, hidden=48, block=16)


def text(seed: int) -> torch.Tensor:
    return torch.randint(256, (2, SHAPE.block), generator=torch.Generator().manual_seed(seed))


def test_no_byte_is_told_of_those_after_it() -> None:
    torch.manual_seed(0)
    model, x = llama.Llama(SHAPE), text(1)
    changed = x.clone()
    changed[:, 9:] = text(2)[:, 9:]
    before, after = model(x), model(changed)
    assert torch.allclose(before[:, :9], after[:, :9], atol=1e-6)
    assert not torch.allclose(before[:, 9:], after[:, 9:], atol=1e-3)


def test_products_of_turned_queries_and_keys_depend_on_their_distance_alone() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(8), torch.randn(8)
    places = llama.turned(torch.stack([q, k])[:, None, :].expand(2, 16, 8), llama.turns(16, 8))
    products = places[0] @ places[1].T  # (place of the query, place of the key)
    for distance in range(-4, 5):
        of_distance = products.diagonal(distance)
        assert torch.allclose(of_distance, of_distance[0].expand_as(of_distance), atol=1e-4)
    assert products.diagonal(0)[0] != pytest.approx(float(products.diagonal(3)[0]), abs=1e-3)


# torch's compiler looks at .grad of what is no leaf, of which torch warns.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("way", ["recompute", "compile"])
def test_activation_checkpointing_and_the_compiler_change_no_gradient(way: str) -> None:
    found = []
    for is_so in (False, True):
        torch.manual_seed(0)
        model = llama.Llama(llama.LlamaShape(2, width=32, hidden=48, block=16, recompute=is_so and way == "recompute"))
        if is_so and way == "compile":
            for block in model.blocks:
                block.compile(backend="eager")
        F.cross_entropy(model(text(1)).flatten(0, 1), text(2).flatten()).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.allclose(plain, other, atol=1e-7) for plain, other in zip(*found, strict=True))
    assert all(gradient.abs().max() > 0 for gradient in found[0])


def test_the_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    rates = [llama.warm_up_and_cosine(step, 10, 100) for step in range(101)]
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert (rates[10], rates[55], rates[100]) == pytest.approx((1.0, 0.55, 0.1))


def losses(folder: Path) -> list[float]:
    found: list[float] = json.loads((folder / "result.json").read_text())["losses"]
    return found


@pytest.mark.parametrize("is_on_servers", [False, True], ids=["alone", "on servers"])
def test_a_run_goes_on_from_its_newest_whole_checkpoint_as_if_it_had_not_ended(
    shared: Cluster, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_on_servers: bool
) -> None:
    """One process, with all that several have: it is a group of one."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

    def run(name: str) -> list[float]:
        servers = {"PS_SERVER": shared.address, "PS_JOB": f"{job}-{name}", "PS_RANK": "0", "PS_WORLD_SIZE": "1"}
        variables = alone | (servers | {"PS_GROUP_SIZE": "1"} if is_on_servers else {})
        words = ("--tensor-parallel=1", "--seed=3", f"--out={tmp_path / name}", *TINY)
        launching.run_here(monkeypatch, SCRIPT, *words, **variables)
        return losses(tmp_path / name)

    whole = run("whole")
    shutil.copytree(tmp_path / "whole" / "step-000004", tmp_path / "rest" / "step-000004")
    shutil.copytree(tmp_path / "whole" / "step-000008", tmp_path / "rest" / "step-000008")
    (tmp_path / "rest" / "step-000008" / ".metadata").unlink()  # as where a process was killed while it wrote
    assert run("rest") == whole[4:]
    result = tmp_path / "whole" / "result.json"
    before = result.stat().st_mtime_ns
    assert run("whole") == whole
    assert result.stat().st_mtime_ns == before, "nothing is left to train"
    assert len(whole) == 8
    assert whole[-1] < whole[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tensor-parallel=3"], "--kv-heads, --hidden and --block are cut by --tensor-parallel 3: multiples of it"),
        (["--heads=3"], "--heads is a multiple of --kv-heads"),
    ],
)
def test_what_cannot_be_cut_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        llama.parse_arguments(words)
    assert said in capsys.readouterr().err


def test_processes_that_are_no_multiple_of_tensor_parallel_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with pytest.raises(SystemExit, match="3 processes are no multiple of --tensor-parallel 2"):
        launching.run_here(monkeypatch, SCRIPT, f"--out={tmp_path}", *TINY, **variables)


@pytest.mark.long
def test_groups_that_read_checkpoints_of_their_own_are_refused_and_also_without_a_group_size(
    shared: Cluster, job: str, tmp_path: Path
) -> None:
    """As a torchrun for each group starts them. Group 1 lacks the checkpoint of the first four steps."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    begun = launching.python(str(SCRIPT), *ONE, "--steps=4", f"--out={tmp_path / '0'}", **alone, MASTER_PORT="0")
    assert begun.returncode == 0, begun.stderr
    servers = {"PS_SERVER": shared.address, "PS_JOB": job, "PS_WORLD_SIZE": "2"}
    commands = launching.Commands(tmp_path)
    try:
        groups = [
            commands.start(
                str(SCRIPT), *ONE, f"--out={tmp_path / number}", **alone, **servers, MASTER_PORT="0", PS_RANK=number
            )
            for number in "01"
        ]
        assert [group.process.wait(120) for group in groups] == [1, 1]
        assert all("begin at the steps [4, 0]: --out must be one folder" in group.err for group in groups)
    finally:
        commands.close()


@pytest.mark.long
@pytest.mark.parametrize("example", cases(["llama"], ["islands"]))
def test_a_group_that_is_killed_goes_on_with_the_job_to_its_end(tmp_path: Path, example: str) -> None:
    script, out = launching.ROOT / "examples" / f"{example}.py", tmp_path / "out"
    words = (*TINY, *MANY) if example == "llama" else ("--layers=1", "--width=32", "--heads=2", "--steps=150")
    servers = ("--shards=1", "--workers=2", "--group=1", "--mode=sync", "--max-restarts=1", "--log-dir", str(tmp_path))
    commands = launching.Commands(tmp_path)
    try:
        run = commands.start("-m", "ps_worker", "run", *servers, str(script), *words, f"--out={out}")
        run.says(r"step 30/150")
        own = [each for each in run.family() if str(script) in each.cmdline() and each.environ().get("PS_RANK") == "1"]
        min(own, key=lambda each: each.create_time()).kill()  # the other ones are its own
        assert run.process.wait(120) == 0, run.err
        assert "restart 1 of 1" in run.out + run.err, "started again"
    finally:
        commands.close()
    name = "result" if example == "llama" else "islands"
    found = json.loads((out / f"{name}.json").read_text())["losses"]
    assert len(found) == 150
    assert found[-1] < found[0]


def without_servers(processes: int, out: Path, *words: str) -> list[float]:
    """The losses that processes of one torchrun have."""
    started = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))
    done = launching.python(*started, str(SCRIPT), *words, f"--out={out}")
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(out)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("members", "words"),
    cases([(4, ())], [(2, ("--tensor-parallel=1", "--recompute"))]),
    ids=["2 x 2", "FSDP2 alone"],
)
def test_a_group_on_servers_ends_as_its_processes_do_alone(
    tmp_path: Path, members: int, words: tuple[str, ...]
) -> None:
    """FSDP2 over tensor parallel in one group of four, which clips as four processes do without servers."""
    alone = without_servers(members, tmp_path / "alone", *TINY, *words)
    servers = ("--shards", "1", "--workers", "1", "--group", str(members), "--mode", "sync")
    done = launching.run(*servers, str(SCRIPT), *TINY, *words, f"--out={tmp_path / 'group'}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(tmp_path / "group") == pytest.approx(alone, abs=1e-5)
    assert alone[-1] < alone[0]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_groups_of_two_end_as_two_by_two_processes_alone_and_others_go_on_from_there(tmp_path: Path) -> None:
    """In the groups tensor parallel cuts the layers; alone FSDP2 does so, too, over the place of the groups."""
    words = (*TINY, UNCLIPPED, "--batch-size=2", "--recompute")

    alone = without_servers(4, tmp_path / "alone", *words)
    servers = ("--shards", "1", "--workers", "2", "--group", "2", "--mode", "sync")
    done = launching.run(*servers, str(SCRIPT), *words, f"--out={tmp_path / 'groups'}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(tmp_path / "groups") == pytest.approx(alone, abs=1e-5)
    assert alone[-1] < alone[0]
    # Two processes, with the batches of all: from the checkpoint that the first group has written.
    shutil.copytree(tmp_path / "groups" / "step-000004", tmp_path / "rest" / "step-000004")
    rest = without_servers(2, tmp_path / "rest", *words, "--batch-size=4")
    assert rest == pytest.approx(alone[4:], abs=1e-4)
