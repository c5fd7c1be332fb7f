"""The language model that learns, the texts that it writes, what they are worth, and the loss of GRPO.

The task: the prompt is a letter, and a text is worth the share of its letters that are this one. A model that knows
nothing reaches 1/26. What is learnt is small, but each process does what it would do for a large model.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from char_gpt import CharGPT, Shape

SHAPE = Shape(layers=2, heads=2, width=64, block=32)
LENGTH = 16  # letters of a text
PROMPTS = "abcdefgh"
FIRST, LETTERS = ord("a"), 26  # bytes that a text may have: the model's other logits are left out
CLIP = 0.2  # how far the probability of a letter may move from what it was when the text was written


@dataclass(frozen=True)
class Group:
    """Texts of one prompt, which are compared with each other.

    version: of the weights that wrote them
    logs:    the logarithm of each letter's probability then
    """

    version: int
    prompt: str
    texts: list[str]
    logs: list[list[float]]


def make_policy() -> CharGPT:
    """Returns a model that knows nothing: the same in every process."""
    torch.manual_seed(0)
    return CharGPT(SHAPE)


def reward(prompt: str, text: str) -> float:
    """Returns what a text is worth, from 0 to 1."""
    return text.count(prompt) / len(text)


def log_probabilities(model: CharGPT, tokens: Tensor) -> Tensor:
    """(batch, length) bytes to (batch, length, LETTERS): how likely each letter is to come next."""
    logits: Tensor = model(tokens)
    return F.log_softmax(logits[..., FIRST : FIRST + LETTERS], dim=-1)


@torch.no_grad()
def write_groups(model: CharGPT, prompts: str, size: int, version: int, generator: torch.Generator) -> list[Group]:
    """Has the model write `size` texts for each prompt."""
    tokens = torch.tensor([[ord(prompt)] for prompt in prompts for _ in range(size)])  # (batch, 1)
    logs = torch.empty(len(tokens), 0)
    for _ in range(LENGTH):
        likely = log_probabilities(model, tokens)[:, -1]
        letters = torch.multinomial(likely.exp(), 1, generator=generator)
        tokens = torch.cat((tokens, letters + FIRST), dim=1)
        logs = torch.cat((logs, likely.gather(1, letters)), dim=1)
    texts = [bytes(row).decode() for row in tokens[:, 1:].tolist()]
    cut = [slice(start, start + size) for start in range(0, len(texts), size)]
    return [Group(version, prompt, texts[part], logs[part].tolist()) for prompt, part in zip(prompts, cut, strict=True)]


def grpo_loss(model: CharGPT, groups: list[Group]) -> Tensor:
    """The loss of group-relative policy optimisation (Shao et al., 2024), without its KL term.

    A text is better or worse than the others of its group by so many standard deviations; each of its letters becomes
    more or less likely accordingly, but by no more than CLIP per batch.
    """
    rewards = torch.tensor([[reward(group.prompt, text) for text in group.texts] for group in groups])
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    texts = [list((group.prompt + text).encode()) for group in groups for text in group.texts]
    tokens = torch.tensor(texts)  # (batch, 1 + LENGTH)
    before = torch.tensor([log for group in groups for log in group.logs])  # (batch, LENGTH)
    likely = log_probabilities(model, tokens[:, :-1])
    now = likely.gather(2, (tokens[:, 1:] - FIRST)[..., None])[..., 0]
    ratio = (now - before).exp()
    gain = advantages.view(-1, 1)
    return -torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
