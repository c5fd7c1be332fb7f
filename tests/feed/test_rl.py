"""The example of reinforcement learning: the model learns, from nothing that is too old, whoever comes and goes."""

from __future__ import annotations

import math
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools import launching
from tests.tools.cases import cases
from tests.tools.cluster import until
from tests.tools.launching import ROOT
from tests.tools.learning_runs import check

FOLDER = ROOT / "examples" / "rl"
BOUND, STEPS, TRAINERS = 2, 100, 2

sys.path.insert(0, str(FOLDER))
pool, policy = launching.load(FOLDER / "pool.py"), launching.load(FOLDER / "policy.py")
sys.path.remove(str(FOLDER))


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", cases(["sync"], ["async"]))
def test_the_model_learns_and_no_text_is_used_that_is_too_old(tmp_path: Path, mode: str) -> None:
    flags = [f"--mode={mode}", f"--steps={STEPS}", f"--bound={BOUND}", "--goal=0.2", f"--out={tmp_path}"]
    done = launching.python(str(FOLDER / "run.py"), *flags, seconds=380)
    assert done.returncode == 0, done.stdout + done.stderr
    check(tmp_path, mode, STEPS, TRAINERS, BOUND)


def groups(name: str, *versions: int) -> list[dict[str, Any]]:
    return [{"version": version, "rollout": name} for version in versions]


def test_the_pool_drops_what_is_too_old_and_counts_it() -> None:
    waiting = pool.Pool(room=10)
    waiting.put(groups("a", 1, 2, 3), 0)
    waiting.put(groups("b", 3, 2), 0)
    version, taken = waiting.take(2, version=4, bound=1, seconds=0)
    assert (version, taken) == (4, [*groups("a", 3), *groups("b", 3)])
    assert waiting.counts() == {"version": 4, "used": {"a": 1, "b": 1}, "dropped": {"a": 2, "b": 1}, "waiting": 0}
    assert waiting.take(1, version=4, bound=1, seconds=0) == (4, [])
    waiting.put(groups("a", 7, 6), 0)  # written with weights of which this trainer has not heard yet
    assert waiting.take(1, version=5, bound=0, seconds=0) == (7, groups("a", 7))
    assert waiting.counts()["dropped"] == {"a": 3, "b": 1}


def test_the_pool_goes_on_with_a_job_that_went_back() -> None:
    waiting = pool.Pool(room=10)
    waiting.put(groups("a", 100, 60), 0)
    assert waiting.take(2, version=60, bound=2, seconds=0) == (100, []), "one looks too old"
    waiting.put(groups("b", 60), 0)
    assert waiting.take(1, version=60, bound=2, seconds=0, anew=True) == (60, groups("b", 60))
    assert waiting.counts() == {"version": 60, "used": {"b": 1}, "dropped": {"a": 2}, "waiting": 0}


def test_those_who_write_wait_for_room_and_trainers_for_texts() -> None:
    waiting = pool.Pool(room=1)
    assert waiting.put(groups("a", 0), 0)
    assert not waiting.put(groups("b", 0), 0), "there is no room"
    found: list[Any] = []
    writer = threading.Thread(target=lambda: found.append(waiting.put(groups("b", 0), 60)))
    writer.start()
    assert waiting.take(1, 0, 2, 60)[1] == groups("a", 0)
    writer.join()
    assert found == [True]
    trainer = threading.Thread(target=lambda: found.append(waiting.take(2, 0, 2, 60)))
    trainer.start()
    until(lambda: waiting.put(groups("c", 0), 0), "room for another")
    trainer.join()
    assert found[1] == (0, [*groups("b", 0), *groups("c", 0)])


def test_the_pool_refuses_what_is_no_request_and_goes_on() -> None:
    service = pool.Service(("127.0.0.1", 0), pool.Pool(room=4))
    at = service.start()
    try:
        for path, body, said in (
            ("/put", [{"version": "x", "rollout": "a"}], "invalid literal"),
            ("/put", [{"version": 1}], "KeyError"),
            ("/put", 3, "TypeError"),
            ("/take", {"count": 1}, "KeyError"),
        ):
            with pytest.raises(OSError, match=said):
                pool.ask(at, path, body)
        assert pool.ask(at, "/put", groups("a", 1))
        assert pool.ask(at, "/take", {"count": 1, "version": 1, "bound": 0}) == [1, groups("a", 1)]
    finally:
        service.shutdown()
        service.server_close()


def test_the_loss_makes_what_was_worth_more_more_likely() -> None:
    model = policy.make_policy()
    [group] = policy.write_groups(model, "e", 8, 3, torch.Generator().manual_seed(0))
    assert (group.version, len(group.texts), {len(text) for text in group.texts}) == (3, 8, {policy.LENGTH})
    tokens = torch.tensor([list(b"e" + text.encode()) for text in group.texts])
    likely = policy.log_probabilities(model, tokens[:, :-1]).gather(2, (tokens[:, 1:] - policy.FIRST)[..., None])
    assert torch.allclose(likely[..., 0], torch.tensor(group.logs), atol=1e-5), "the texts' own probabilities"

    better, worse = "e" * policy.LENGTH, "x" * policy.LENGTH
    logs = [[-math.log(policy.LETTERS)] * policy.LENGTH] * 2
    told = policy.Group(0, "e", [better, worse], logs)

    def how_likely(text: str) -> float:
        tokens = torch.tensor([list(f"e{text}".encode())])
        with torch.no_grad():
            found = policy.log_probabilities(model, tokens[:, :-1]).gather(2, (tokens[:, 1:] - policy.FIRST)[..., None])
        return float(found.sum())

    before = how_likely(better), how_likely(worse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy.grpo_loss(model, [told]).backward()
    optimizer.step()
    assert how_likely(better) > before[0]
    assert how_likely(worse) < before[1]
