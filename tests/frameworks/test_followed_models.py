"""Models of Hugging Face's transformers follow a job: served over HTTP, and loaded from the files that a feed saves."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ps_torch as ps
from tests.tools.cluster import Cluster, until
from tests.tools.framework_processes import needs
from tests.tools.remembering_trainer import RememberingTrainer

pytestmark = needs("transformers")

TOKENS = 48


def make_llama(tied: bool = True) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def loss(model: Any) -> torch.Tensor:
    tokens = torch.randint(TOKENS, (4, 12))
    found: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return found


@pytest.fixture
def trainer(shared: Cluster, job: str) -> Iterator[RememberingTrainer[Any]]:
    with shared.connect("sync", job=job) as session:
        own = make_llama()
        yield RememberingTrainer(session, own, loss, torch.optim.SGD(own.parameters(), lr=0.5))


def ask(port: int, path: str, body: Any = None) -> tuple[int, int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        text = None if body is None else body if isinstance(body, str) else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, text)
        answer = connection.getresponse()
        return answer.status, int(answer.headers["x-model-version"]), json.loads(answer.read())
    finally:
        connection.close()


def test_an_answer_is_of_the_version_that_it_says(shared: Cluster, job: str, trainer: RememberingTrainer[Any]) -> None:
    from ps_torch.engines.huggingface import FollowingModels, GenerationServer

    prompt, length = [[1, 2, 3], [4, 5, 6]], 12
    with ps.subscribe(shared.address, job) as feed:
        server = GenerationServer(("127.0.0.1", 0), FollowingModels(feed, make_llama))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = int(server.server_address[1])
        answers: list[tuple[int, dict[str, Any]]] = []

        def request() -> None:
            for _ in range(15):
                code, version, answer = ask(port, "/generate", {"ids": prompt, "max_new_tokens": length})
                assert code == 200, answer
                answers.append((version, answer))

        threads = [threading.Thread(target=request) for _ in range(3)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            trainer.step()
        try:
            assert len(answers) == 45
            model = make_llama().eval()
            texts = set()
            for version, answer in answers:
                model.load_state_dict(trainer.past[version])
                tokens = torch.tensor(prompt)
                settings = {"max_new_tokens": length, "do_sample": False}
                expected = model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings).tolist()
                assert (answer["ids"], answer["version"]) == (expected, version)
                texts.add(str(expected))
            assert len(texts) > 3, "versions differ in what they write"
            clock = trainer.session.clock
            until(lambda: ask(port, "/generate", {"ids": prompt})[1] == clock, "the newest version")
            check_refusals(port, clock)
        finally:
            server.shutdown()
            server.server_close()


def check_refusals(port: int, version: int) -> None:
    """What is no request gets one clear answer with a version, and the server goes on."""
    for body, said in (
        ("{", "Expecting property name"),
        ([], "no attribute"),
        ({}, "ids"),
        ({"ids": []}, "rows of tokens"),
        ({"ids": [[1], [1, 2]]}, "rows of tokens"),
        ({"ids": [[TOKENS]]}, f"from 0 to {TOKENS - 1}"),
        ({"ids": [["a"]]}, f"from 0 to {TOKENS - 1}"),
        ({"ids": [[1]], "max_new_tokens": 0}, "1 to 4096 tokens"),
        ({"ids": [[1]], "temperature": "hot"}, "could not convert"),
        ('{"ids": [[1]], "max_new_tokens": Infinity}', "infinity"),
    ):
        code, told, answer = ask(port, "/generate", body)
        assert (code, told) == (400, version), (body, answer)
        assert said in answer["error"]
    assert ask(port, "/healthz")[:2] == (200, version)
    assert ask(port, "/generate", {"ids": [[1]], "temperature": 0.7})[0] == 200


def test_transformers_loads_what_a_feed_saves_in_parts(
    shared: Cluster, job: str, trainer: RememberingTrainer[Any], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    make_llama().config.save_pretrained(tmp_path)
    with ps.subscribe(shared.address, job, wire="bfloat16") as feed:
        for _ in range(2):
            clock = trainer.step()
            feed.wait_for(clock)
            assert feed.save(tmp_path, max_shard_bytes=10_000) == clock
            assert len([*tmp_path.glob("*.safetensors")]) > 2
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
            assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
            own = loaded.state_dict()
            assert own.keys() == trainer.past[clock].keys()
            assert all(torch.equal(own[name], each.bfloat16()) for name, each in trainer.past[clock].items())


def test_an_untied_model_takes_tied_weights(shared: Cluster, job: str, trainer: RememberingTrainer[Any]) -> None:
    trainer.step()
    names = {"lm_head.weight": "model.embed_tokens.weight"}
    with ps.subscribe(shared.address, job, names=names) as feed:
        feed.wait_for(1)
        model = feed.load(make_llama(tied=False))
        tokens = torch.randint(TOKENS, (2, 5))
        assert torch.equal(model(tokens).logits, trainer.model(tokens).logits)
