"""What the documents show is true: their scripts run, and what is made from the code is up to date."""

from __future__ import annotations

import ast
import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ps_torch
from ps_server.config import ADVERTISE, COORDINATOR, HEALTH_PORT, INDEX, MAX_SHARD_RESTARTS, SHARD_START_TIMEOUT, SHARDS
from ps_server.config import SETTINGS as SERVER_SETTINGS
from ps_server.relay_config import RELAY
from ps_server.storage.export import export
from ps_worker.cli import LAUNCH_SETTINGS
from ps_worker.config import SETTINGS as WORKER_SETTINGS
from ps_worker.launch_server_settings import SERVER_SETTINGS as OWN_SERVER_SETTINGS
from tests.tools import launching
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, until
from tests.tools.imports import PACKAGES, syntax

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"


def _scripts(document: Path) -> list[str]:
    """The Python blocks of a document that are whole scripts: they connect, and import what they use."""
    blocks = re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)
    return [block for block in blocks if "import ps_torch" in block and "connect()" in block]


def test_the_reference_is_what_the_docstrings_say() -> None:
    made = launching.load(DOCS / "make_reference.py").document()
    assert (DOCS / "reference.md").read_text() == made, "run `make reference`"


def _examples() -> dict[str, str]:
    """The examples in the docstrings that the reference has, by the name of what they show."""
    made = re.split(r"^###? (.+)$", (DOCS / "reference.md").read_text(), flags=re.MULTILINE)
    found = {
        name: re.search(r"^\*\*Example:\*\*\n\n```python\n(.*?)```", text, re.DOTALL | re.MULTILINE)
        for name, text in zip(made[1::2], made[2::2], strict=True)
    }
    return {name: example[1] for name, example in found.items() if example is not None}


@pytest.mark.parametrize("mode", ["single", "sync"])
@pytest.mark.parametrize("name", ["connect", "session.prepare"])
def test_the_examples_of_connect_and_prepare_are_whole_scripts(
    shared: Cluster, job: str, tmp_path: Path, name: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(_examples()[name] + "\nassert session.clock in (3, 16)\n")
    launching.run_here(monkeypatch, script, PS_MODE=mode, PS_SERVER=shared.address, PS_JOB=job)


def test_the_other_examples_of_docstrings_run_in_a_session(
    shared: Cluster, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # The page on feeds has the code of ps_feed.subscribe, and test_engines.py calls `update`, which needs vLLM.
    elsewhere = {"connect", "session.prepare", *FEED_EXAMPLES, "ps_feed.subscribe", "ps_torch.engines.vllm.update"}
    examples = {name: text for name, text in _examples().items() if name not in elsewhere}
    assert len(examples) > 8
    embedding = ps_torch.Embedding(8)
    with shared.connect("sync", job=job) as session:
        model = torch.nn.Linear(4, 1)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        there = {"session": session, "model": model, "optimizer": optimizer, "x": torch.ones(2, 4), "loader": [1, 2]}
        for text in examples.values():
            exec(text, {"torch": torch, "ps_torch": ps_torch, "embedding": embedding, **there})
        assert session.clock == 1
    assert set(torch.load("model.pt", weights_only=True)) == {"weight", "bias"}


FEED_EXAMPLES = ("ps_torch.subscribe", "weights.reading", "weights.reading_async", "ps_torch.MadeOf")


def test_the_examples_of_feeds_follow_a_job(shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_JOB", job)
    with shared.connect("sync", job=job) as session:
        model = torch.nn.Linear(4, 1)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with ps_torch.subscribe(shared.address) as feed:
            there = {"feed": feed, "model": feed.load(torch.nn.Linear(4, 1)), "question": torch.ones(2, 4)}
            there |= {"ps_torch": ps_torch, "torch": torch, "asyncio": asyncio, "Model": lambda: torch.nn.Linear(4, 1)}
            for name in FEED_EXAMPLES:
                text = _examples()[name].replace("trainer:50051", shared.address)
                left = dict(there)
                waited = eval(compile(text, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), left)
                if waited is not None:
                    asyncio.run(waited)
                assert name == "ps_torch.MadeOf" or torch.equal(left["answer"], model(torch.ones(2, 4)))
                if left["feed"] is not feed:
                    left["feed"].close()


class _Samples:
    """What rollouts make, of which a trainer takes five."""

    def __init__(self) -> None:
        self._made: deque[Any] = deque(maxlen=4)
        self.put = self._made.append

    def __iter__(self) -> Iterator[Any]:
        for _ in range(5):
            until(lambda: self._made, "a sample")
            yield self._made.popleft()


def test_the_code_of_the_page_on_feeds_runs_beside_each_other(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts, their trainer, an engine and a reader of one job. tests/feed/test_engines.py has the code for vLLM."""
    first, rollout, trainer, names, vllm, following, arrays = (
        text.replace("trainer:50051", shared.address).replace('"default"', repr(job))
        for text in re.findall(r"^```python\n(.*?)^```", (DOCS / "feed.md").read_text(), re.DOTALL | re.MULTILINE)
    )
    assert "LLM(" in vllm
    for name, value in {"SERVER": shared.address, "JOB": job, "MODE": "sync", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(f"PS_{name}", value)
    model, cells, loaded = torch.nn.Linear(4, 4), torch.ones(2, 4), dict[str, torch.Tensor]()
    engine = SimpleNamespace(load_weights=loaded.update, version=-1)
    engine.load = lambda found, version: setattr(engine, "arrays", (version, found))
    there = {"ps": ps_torch, "torch": torch, "engine": engine, "samples": _Samples(), "policy": model}
    there |= {"Model": lambda: torch.nn.Linear(4, 4), "Policy": lambda: torch.nn.Linear(4, 4)}
    there |= {"question": cells, "prompts": cells, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    there |= {"generate": lambda policy, asked: policy(asked).detach(), "loss": lambda policy, made: policy(made).sum()}

    def run(text: str) -> dict[str, Any]:
        exec(text, found := dict(there))
        return found

    with ThreadPoolExecutor() as others:
        beside = [others.submit(run, text) for text in (rollout, following, arrays)]
        trained = run(trainer)
        read = run(first)
        read["feed"].close()
        clock = trained["session"].clock
        trained["session"].close()
        for each in beside:
            each.result(60)
    assert (read["version"], engine.version, engine.arrays[0]) == (clock, clock, clock)
    assert clock > 0
    assert torch.equal(read["answer"], trained["policy"](cells))
    assert torch.equal(loaded["weight"], trained["policy"].weight.bfloat16())
    assert engine.arrays[1]["weight"].tobytes() == loaded["weight"].view(torch.uint16).numpy().tobytes()
    assert run(names)["names"].keys() == {"qkv.weight", "up.weight", "head.weight"}


def test_the_page_of_settings_has_each_as_it_is_declared() -> None:
    servers = (
        SHARDS,
        MAX_SHARD_RESTARTS,
        SHARD_START_TIMEOUT,
        INDEX,
        COORDINATOR,
        ADVERTISE,
        HEALTH_PORT,
        *SERVER_SETTINGS,
    )
    known = {each.name for each in (*servers, *WORKER_SETTINGS)} - {"token_file"}
    relays = [each for each in RELAY if each.name not in known]
    declared = (*servers, *LAUNCH_SETTINGS, *OWN_SERVER_SETTINGS, *WORKER_SETTINGS, *relays)
    rows = [f"| `{each.key}` | {f'`{each.default}`' if each.default else ''} | {each.text} |" for each in declared]
    page = (DOCS / "configuration.md").read_text()
    shown = re.findall(r"^\| `[a-z-]+` \|.*", page.partition("## All settings of servers")[2], re.MULTILINE)
    assert shown == rows


def test_all_tables_of_which_call_gives_which_weights_name_the_same_modes() -> None:
    """`global_weights` and `barrier` fetch where workers may have weights of different steps: with a quorum, too."""
    tables = [
        re.findall(r"^ *\| (`[^|]*) \|", text.partition("global_weights()` |")[2].partition("\n\n")[0], re.MULTILINE)
        for text in ((DOCS / name).read_text() for name in ("training.md", "save-and-resume.md"))
    ]
    wanted = ["`single`, `ddp`, `sync`", "`ssp:K`, `async`, `sync` with a quorum", "`local:H`"]
    assert [table[:3] for table in tables] == [wanted, wanted]


def test_the_first_example_of_the_readme_is_the_file() -> None:
    [shown] = _scripts(README)
    _, _, code = (ROOT / "examples" / "train.py").read_text().partition('"""\n\n')
    assert shown == code


@pytest.mark.parametrize("mode", cases(["sync"], ["single", "async"]))
def test_the_first_example_runs_as_it_stands(
    shared: Cluster,
    job: str,
    tmp_path: Path,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    [shown] = _scripts(README)
    script = tmp_path / "train.py"
    script.write_text(shown)
    launching.run_here(monkeypatch, script, PS_MODE=mode, PS_SERVER=shared.address, PS_JOB=job)
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == 5
    assert losses[-1] < 0.3
    assert set(load_file(tmp_path / "model.safetensors")) == {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.mark.parametrize(("first", "second"), cases([("single", "sync"), ("sync", "single")], [("sync", "sync")]))
def test_the_recipe_resumes(
    shared: Cluster, job: str, tmp_path: Path, first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [shown] = _scripts(DOCS / "save-and-resume.md")

    def train(folder: str, *epochs: tuple[int, str]) -> Any:
        script = tmp_path / folder / "train.py"
        script.parent.mkdir()
        script.write_text(shown)
        for count, mode in epochs:
            where = {"PS_MODE": mode, "PS_SERVER": shared.address, "PS_JOB": job}
            launching.run_here(monkeypatch, script, str(count), **where)
        return torch.load(script.parent / "checkpoint.pt", weights_only=True)

    found = train("halves", (2, first), (4, second))
    assert found["epoch"] == 4
    assert found["optimizer"]["state"][0]["step"] == 4 * 16
    assert found["optimizer"]["param_groups"][0]["lr"] == pytest.approx(1e-2 * 0.95**4)
    if (first, second) == ("sync", "sync"):
        whole = train("whole", (4, "sync"))
        assert all(torch.equal(value, whole["model"][key]) for key, value in found["model"].items())


def test_what_is_exported_is_loaded_as_shown(
    make_cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (DOCS / "save-and-resume.md").read_text()
    [shown] = re.findall(r"```python\n([^`]*model_state_dict\(Path\(\"out\"\)\).*?)```", text, re.S)
    model = torch.nn.Linear(3, 2)
    with make_cluster(checkpoint_dir=tmp_path / "checkpoints").connect("sync") as session:
        trained, stepped = session.prepare(model, torch.optim.AdamW(model.parameters()))
        trained(torch.ones(1, 3)).sum().backward()
        stepped.step()
        expected = {key: value.clone() for key, value in trained.state_dict().items()}
    until(lambda: list(tmp_path.glob("checkpoints/default/*/manifest.json")), "the last checkpoint")
    export(tmp_path / "checkpoints", "default", None, tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    plain = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(plain.parameters())
    exec(shown, {"model": plain, "optimizer": optimizer})
    assert all(torch.equal(value, plain.state_dict()[key]) for key, value in expected.items())
    assert [float(state["step"]) for state in optimizer.state.values()] == [1.0, 1.0]


# What stands for a value: a number, a name in capitals, a place in a format.
VALUES = re.compile(r"'?\b(?:\d+|[A-Z][A-Z_]*)\b'?|%[sdg]")


def _texts_of_the_code() -> str:
    """All that the packages can say, with a zero where a value goes in."""
    texts: list[str] = []
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(syntax(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "0" for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return VALUES.sub("0", "\n".join(texts))


def _is_said(message: str, texts: str) -> bool:
    """Whether at least half of its runs of three words without a value are there: some hold a name that goes in."""
    words = VALUES.sub("0", message).replace("...", " ").split()
    runs = [words[at : at + 3] for at in range(max(1, len(words) - 2))]
    bare = [" ".join(run).strip(" ,;:()") for run in runs if "0" not in run] or [" ".join(words).strip(" :")]
    return 2 * sum(run in texts for run in bare) >= len(bare)


def test_the_messages_of_troubleshooting_are_those_of_the_code() -> None:
    texts = _texts_of_the_code()
    rows = re.findall(r"^\| `(.+?)`[^|]*\|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(rows) > 40
    assert [row for row in rows if not _is_said(row, texts)] == []
    assert not _is_said("the flux capacitor of shard 3 is empty", texts)
