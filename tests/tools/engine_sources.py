"""What the adapters of inference engines use of an engine, read from its sources, and what does not fit it.

Nothing of an engine is imported.

tests/feed/data/engine_interfaces.json has this of several releases. `python -m tests.tools.engine_sources vllm FOLDER`
prints it for sources in a folder, so that a release can be added.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# By engine: the names that the adapters use. Each is looked for in the first file of its list that there is.
WANTED = {
    "vllm": {
        "WeightTransferEngine": ["vllm/distributed/weight_transfer/base.py"],
        "WeightTransferEngineFactory": ["vllm/distributed/weight_transfer/factory.py"],
        "GroupCoordinator": ["vllm/distributed/parallel_state.py"],
        "get_world_group": ["vllm/distributed/parallel_state.py"],
        "initialize_layerwise_reload": ["vllm/model_executor/model_loader/reload/layerwise.py"],
        "finalize_layerwise_processing": ["vllm/model_executor/model_loader/reload/layerwise.py"],
        "LLM": ["vllm/entrypoints/rl/offline.py", "vllm/entrypoints/llm.py"],
    },
    "sglang": {"UpdateWeightFromDiskReqInput": ["sglang/srt/managers/io_struct.py"]},
}
ROUTES = {
    "vllm": ["vllm/entrypoints/rl/online/api_router.py", "vllm/entrypoints/serve/dev/rlhf/api_router.py"],
    "sglang": ["sglang/srt/entrypoints/http_server.py"],
}
# Of a class only these members, of a server only these routes: the others are none of the adapters' business.
MEMBERS = {
    "GroupCoordinator": {"broadcast", "broadcast_object", "rank_in_group"},
    "WeightTransferEngineFactory": {"register_engine"},
    "LLM": {
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "get_weight_version",
    },
}
PATHS = {
    "vllm": ("/start_weight_update", "/update_weights", "/finish_weight_update", "/weight_info", "/pause", "/resume"),
    "sglang": ("/update_weights_from_disk", "/model_info"),
}
RENAMED = {"LLM": "RLOfflineMixin"}  # in later releases a base class of LLM has these methods
# By what the adapters call: the name by which an engine defines it.
CALLED = {
    "get_world_group": "get_world_group",
    "initialize_layerwise_reload": "initialize_layerwise_reload",
    "finalize_layerwise_reload": "finalize_layerwise_processing",
    "register_engine": "WeightTransferEngineFactory.register_engine",
    "broadcast": "GroupCoordinator.broadcast",
    "broadcast_object": "GroupCoordinator.broadcast_object",
    "start_weight_update": "LLM.start_weight_update",
    "update_weights": "LLM.update_weights",
    "finish_weight_update": "LLM.finish_weight_update",
}
GIVES_WEIGHTS = ("POST /start_weight_update", "POST /update_weights", "POST /finish_weight_update")


def facts_of(engine: str, root: Path) -> dict[str, Any]:
    """What an engine's sources say.

    takes:    by function or method, the names of its parameters without `self`; by class, those of its fields
    abstract: the methods that a subclass has to have
    routes:   by method and path, the names of a handler's parameters
    """
    takes: dict[str, list[str]] = {}
    abstract: list[str] = []
    for name, places in WANTED[engine].items():
        nodes = [*_defined(root, places, {name, RENAMED.get(name, name)})]
        if not nodes:
            continue
        if isinstance(nodes[0], ast.ClassDef):
            for method in _methods(nodes[0]):
                if method.name in MEMBERS.get(name, {method.name}) and not _is_private(method.name):
                    takes[f"{name}.{method.name}"] = _parameters(method)
                    if "abstractmethod" in map(_named, method.decorator_list):
                        abstract.append(f"{name}.{method.name}")
            fields = [each.target.id for each in nodes[0].body if _is_field(each)]
            fields = [each for each in fields if each in MEMBERS.get(name, {each})]
            if fields:
                takes[name] = fields
        else:
            takes[name] = _parameters(nodes[0])
    return {"takes": takes, "abstract": abstract, "routes": dict(_routes(engine, root))}


def misfits_of_vllm(facts: dict[str, Any], *adapter: Path) -> list[str]:
    """What of the adapter does not fit a vLLM: its methods, its calls, and the routes that its middleware watches."""
    takes, found = facts["takes"], []
    nodes = [node for path in adapter for node in ast.walk(ast.parse(path.read_text()))]
    own = next(node for node in nodes if isinstance(node, ast.ClassDef) and node.name == "FeedTransferEngine")
    methods = {method.name: _parameters(method) for method in _methods(own) if method.name != "__init__"}
    for name in facts["abstract"]:
        if name.partition(".")[2] not in methods:
            found.append(f"{name} is missing")
    for name, parameters in methods.items():
        wanted = takes.get(f"WeightTransferEngine.{name}", parameters)
        if parameters != wanted:
            found.append(f"WeightTransferEngine.{name} takes {wanted}")
    for node in nodes:
        called = CALLED.get(_named(node.func)) if isinstance(node, ast.Call) else None
        if called is not None and not _fits(node, called, takes):
            found.append(f"{called} takes {takes.get(called)}, and is called as {ast.unparse(node)}")
    if takes.get("GroupCoordinator") != ["rank_in_group"]:
        found.append("GroupCoordinator has no rank_in_group")
    return found + [f"there is no {route}" for route in GIVES_WEIGHTS if route not in facts["routes"]]


def _fits(call: Any, called: str, takes: dict[str, list[str]]) -> bool:
    names = {each.arg for each in call.keywords}
    if "weight_version" in names and "LLM.get_weight_version" not in takes:
        return True  # the adapter looks for that method before
    known = takes.get(called)
    return known is not None and len(call.args) + len(names) <= len(known) and names <= set(known)


def _routes(engine: str, root: Path) -> Iterator[tuple[str, list[str]]]:
    path = next((root / place for place in ROUTES[engine] if (root / place).exists()), None)
    for node in ast.walk(ast.parse(path.read_text())) if path is not None else ():
        for each in node.decorator_list if isinstance(node, ast.AsyncFunctionDef) else ():
            if isinstance(each, ast.Call) and _named(each.func) in ("get", "post") and each.args:
                path_of = each.args[0]
                if isinstance(path_of, ast.Constant) and path_of.value in PATHS[engine]:
                    yield f"{_named(each.func).upper()} {path_of.value}", _parameters(node)


def _defined(root: Path, places: list[str], names: set[str]) -> Iterator[Any]:
    path = next((root / place for place in places if (root / place).exists()), None)
    for node in ast.parse(path.read_text()).body if path is not None else ():
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in names:
            yield node


def _methods(of: ast.ClassDef) -> list[ast.FunctionDef]:
    return [node for node in of.body if isinstance(node, ast.FunctionDef)]


def _is_private(name: str) -> bool:
    return name.startswith("_") and name != "__init__"


def _is_field(node: ast.stmt) -> Any:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_")


def _parameters(function: Any) -> list[str]:
    found = function.args
    names = [each.arg for each in (*found.posonlyargs, *found.args, *found.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def _named(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


if __name__ == "__main__":
    print(json.dumps(facts_of(sys.argv[1], Path(sys.argv[2])), indent=1))
