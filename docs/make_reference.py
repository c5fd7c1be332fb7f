"""Writes docs/reference.md from the docstrings of the package: `make reference`.

Docstrings are in Google style: the sections Args, Attributes, Raises, Returns, Yields and Example are rendered with a
title each, and all other text stays Markdown. In docstrings without sections, a line `name: meaning` of a parameter or
an attribute becomes an item of a list.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ps_torch
from ps_feed.edition import EditionArrays
from ps_feed.subscribing import subscribe as subscribe_without_torch
from ps_feed.subscription import Subscription
from ps_worker import session
from ps_worker.connecting import connect
from ps_worker.edition_tensors import Edition, MadeOf
from ps_worker.followed_model import WeightFeed, subscribe
from ps_worker.model.optimizer import ServerOptimizer
from ps_worker.row_feed import RowFeed
from ps_worker.tables import freezing, modules
from ps_worker.tables import table_optimizers as optimizers
from ps_worker.tables.given_rows import RowFile

_DEFINED = (ast.FunctionDef, ast.ClassDef)

OUTPUT = Path(__file__).parent / "reference.md"

HEAD = """# Reference

Made from the docstrings by `make reference`; do not edit it by hand. Guides: [training.md](training.md),
[save-and-resume.md](save-and-resume.md). Scripts `import ps_torch as ps`; those that import the same names from
`ps_worker` run for one more version. Flags of the commands: `ps-worker run --help`, `ps-server up --help`.

* [connect](#connect) · [Session](#session) · [The prepared optimizer](#the-prepared-optimizer) · [Tables](#tables) ·
  [Feeds of weights](#feeds-of-weights) · [Frameworks](#frameworks) · [Errors](#errors)
"""
OPTIMIZER_METHODS = ("step", "state_dict", "load_state_dict", "add_param_group")

# By module for a framework: its public names. These are extras, so the sources are read, and not imported.
FRAMEWORKS = {
    "accelerate": ("connect", "join"),
    "engines.answers": ("TellsVersion",),
    "engines.huggingface": ("FollowingModels", "GenerationServer"),
    "engines.sglang": ("DiskFollower",),
    "engines.vllm": ("update", "FeedTransferEngine", "FollowInfo", "WantedVersion", "register"),
    "huggingface": ("OnServers", "PsTrainer"),
    "lightning": ("ParameterServerStrategy", "ParameterServerGroupStrategy", "FabricParameterServerStrategy"),
    "ray": ("PsConfig", "ParameterServer", "ActorGroups"),
}
# Beside a module's own file: another one that defines some of its names.
ALSO_DEFINED_IN = {"engines.vllm": "engines.loaded_versions"}

# A line that explains one or more names: "rank: from 0", "tls_cert, tls_key: this worker's certificate and key".
EXPLAINS = re.compile(r"([a-z_]+(?:, [a-z_]+)*): +(\S.*)")
# The line that begins a section of Google style, and an item of one, such as "*things: Models." or "PSError: A server
# failed."
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields|Example):")
ITEM = re.compile(r"((?:\*{0,2}\w+)(?:, \w+)*): +(\S.*)")


def document() -> str:
    """Returns the whole page."""
    parts = [HEAD, *entry("##", "connect", connect, "ps_torch."), *session_entries(), *optimizer_entries()]
    return "\n".join([*parts, *table_entries(), *feed_entries(), *framework_entries(), *error_table()]) + "\n"


def session_entries() -> Iterator[str]:
    """Yields the class, then its public members in the order of the source."""
    yield "## Session\n"
    yield text_of(inspect.getdoc(session.Session) or "", None) + "\n"
    yield from member_entries(session.Session, "session")


def member_entries(cls: type, called_so: str) -> Iterator[str]:
    """Yields the public members of a class in the order of the source."""
    for name, member in vars(cls).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            yield f"### {called_so}.{name}\n"
            yield text_of(inspect.getdoc(member) or "", set()) + "\n"
        else:
            yield from entry("###", f"{called_so}.{name}", getattr(cls, name))


def optimizer_entries() -> Iterator[str]:
    """Yields the optimizer that `prepare` returns in the modes with servers."""
    yield "## The prepared optimizer\n"
    yield text_of(inspect.getdoc(ServerOptimizer) or "", set()) + "\n"
    for name in OPTIMIZER_METHODS:
        yield from entry("###", f"optimizer.{name}", getattr(ServerOptimizer, name))


def table_entries() -> Iterator[str]:
    """Yields the modules whose rows are in tables, and the optimizers that only tables have."""
    yield "## Tables\n"
    yield "[tables.md](tables.md) says what they promise.\n"
    for cls in (modules.Embedding, modules.EmbeddingBag, RowFile, RowFeed):
        yield f"### ps_torch.{cls.__name__}\n"
        signature = inspect.signature(cls.__init__).replace(return_annotation=cls.__name__)
        yield f"```python\n{called(f'ps_torch.{cls.__name__}', signature)}\n```\n"
        yield text_of(inspect.getdoc(cls) or "", None) + "\n"
        if cls is modules.Embedding:
            yield from entry("###", "ps_torch.Embedding.from_pretrained", modules.Embedding.from_pretrained)
            for name in ("assign", "rows", "announce"):
                yield from entry("###", f"embedding.{name}", getattr(modules.Embedding, name))
    yield from member_entries(RowFeed, "feed")
    for function in (optimizers.RowWiseAdagrad, optimizers.Ftrl):
        yield from entry("###", f"ps_torch.{function.__name__}", function)
    yield from entry("###", "ps_torch.freeze", freezing.freeze)


def feed_entries() -> Iterator[str]:
    """Yields what follows a job's weights."""
    yield "## Feeds of weights\n"
    yield "[feed.md](feed.md) says what they promise.\n"
    yield from entry("###", "ps_torch.subscribe", subscribe)
    for cls, called_so in ((WeightFeed, "weights"), (Edition, "edition"), (MadeOf, "")):
        yield f"### {'ps_torch.' if cls is MadeOf else ''}{cls.__name__}\n"
        yield text_of(inspect.getdoc(cls) or "", None) + "\n"
        if called_so:
            yield from member_entries(cls, called_so)
    yield from entry("###", "ps_feed.subscribe", subscribe_without_torch)
    yield from entry("###", "subscription.wait", Subscription.wait)
    yield from entry("###", "arrays.names", EditionArrays.names)
    yield from entry("###", "arrays.tensor", EditionArrays.tensor)


def framework_entries() -> Iterator[str]:
    """Yields what the modules for frameworks offer."""
    yield "## Frameworks\n"
    yield "Each needs its extra; [frameworks.md](frameworks.md), [feed.md](feed.md) and [ray.md](ray.md) show how.\n"
    for module, names in FRAMEWORKS.items():
        place = Path(str(session.__file__)).parent / module.replace(".", "/")
        sources = sorted(place.glob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
        if module in ALSO_DEFINED_IN:
            sources.append(Path(str(session.__file__)).parent / f"{ALSO_DEFINED_IN[module].replace('.', '/')}.py")
        nodes = [node for source in sources for node in ast.parse(source.read_text()).body]
        defined = {node.name: node for node in nodes if isinstance(node, _DEFINED)}
        for name in names:
            yield f"### ps_torch.{module}.{name}\n"
            constructor = _constructor(defined[name])
            if constructor is not None:
                taken = ast.unparse(constructor.args).removeprefix("self, ")
                yield f"```python\nps_torch.{module}.{name}({taken})\n```\n"
            yield text_of(ast.get_docstring(defined[name]) or "", None) + "\n"


def _constructor(defined: ast.FunctionDef | ast.ClassDef) -> ast.FunctionDef | None:
    """Returns the function that a call of a name calls; None for a class that inherits it."""
    if isinstance(defined, ast.FunctionDef):
        return defined
    return next((node for node in defined.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"), None)


def error_table() -> Iterator[str]:
    """Yields every error that `ps_torch` exports, with the first sentence of its docstring."""
    yield "## Errors\n"
    yield "All are exported by `ps_torch` and derive from `PSError`. [troubleshooting.md](troubleshooting.md) has the"
    yield "messages and what to do.\n"
    yield "| error | also a | when |"
    yield "|---|---|---|"
    for name in ps_torch.__all__:
        error = getattr(ps_torch, name)
        if inspect.isclass(error) and issubclass(error, ps_torch.PSError):
            bases = ", ".join(f"`{base.__name__}`" for base in error.__bases__ if base is not ps_torch.PSError)
            yield f"| `{name}` | {bases} | {' '.join((inspect.getdoc(error) or '').split())} |"


def entry(level: str, title: str, function: Callable[..., Any], prefix: str = "") -> Iterator[str]:
    """Yields the heading, the signature and the docstring of a function."""
    function = inspect.unwrap(function)
    signature = inspect.signature(function)
    yield f"{level} {title}\n"
    yield "```python"
    yield called(prefix + title, signature)
    yield "```\n"
    yield text_of(inspect.getdoc(function) or "", set(signature.parameters)) + "\n"


def called(name: str, signature: inspect.Signature) -> str:
    """Returns a call as a script writes it: a parameter a line if there are many."""
    kinds = inspect.Parameter
    words: list[str] = []
    for key, parameter in signature.parameters.items():
        if key == "self":
            continue
        if parameter.kind is kinds.KEYWORD_ONLY and not any(word.startswith("*") for word in words):
            words.append("*")
        star = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is kinds.empty else f" = {parameter.default!r}"
        words.append(f"{star}{key}: {parameter.annotation}{default}")
    # What contextlib.contextmanager makes of a generator.
    returned = (
        "ContextManager[None]" if signature.return_annotation == "Iterator[None]" else signature.return_annotation
    )
    short = f"{name}({', '.join(words)}) -> {returned}"
    return short if len(short) <= 100 else "\n".join([f"{name}(", *(f"    {w}," for w in words), f") -> {returned}"])


def text_of(docstring: str, names: set[str] | None) -> str:
    """Returns a docstring as Markdown. names: what a list item may explain outside of sections; None: anything."""
    paragraphs: list[str] = []
    for title, body in sections_of(docstring):
        if title is None:
            paragraphs.append(_prose(body, names))
        elif title == "Example":
            paragraphs.append(f"**Example:**\n\n```python\n{body}\n```")
        elif title in ("Returns", "Yields"):
            paragraphs.append(f"**{title}:** {body}")
        else:
            paragraphs.append(f"**{title}:**\n\n{_items(body)}")
    return "\n\n".join(paragraphs)


def sections_of(docstring: str) -> Iterator[tuple[str | None, str]]:
    """Yields the sections of a docstring in Google style, with their titles; None: text outside of any."""
    title: str | None = None
    lines: list[str] = []
    for line in [*docstring.splitlines(), None]:
        ends = line is None or (title is not None and bool(line) and not line.startswith(" "))
        begins = None if line is None else SECTION.fullmatch(line)
        if ends or begins:
            body = textwrap.dedent("\n".join(lines)).strip("\n")
            if body:
                yield title, body
            title, lines = None, []
        if begins:
            title = begins[1]
        elif line is not None:
            lines.append(line)


def _items(body: str) -> str:
    """Returns the items of a section as a list."""
    lines = []
    for line in body.splitlines():
        item = None if line.startswith(" ") else ITEM.fullmatch(line)
        if item:
            named = ", ".join(f"`{name}`" for name in item[1].split(", "))
            lines.append(f"* {named}: {item[2]}")
        else:
            lines.append(f"  {line.strip()}".rstrip())
    return "\n".join(lines)


def _prose(docstring: str, names: set[str] | None) -> str:
    lines: list[str] = []
    inside = False  # in an item of a list
    for line in docstring.splitlines():
        item = EXPLAINS.fullmatch(line)
        if item and (names is None or set(item[1].split(", ")) <= names):
            if not inside and lines and lines[-1]:
                lines.append("")
            explained = ", ".join(f"`{name}`" for name in item[1].split(", "))
            lines.append(f"* {explained}: {item[2]}")
            inside = True
        elif inside and line.startswith(" "):
            lines.append(f"  {line.strip()}")
        else:
            if inside and line:
                lines.append("")
            inside = False
            lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    OUTPUT.write_text(document())
