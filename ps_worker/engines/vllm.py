"""vLLM follows a job: an engine for its weight transfer. Needs `vllm`, 0.25 or later.

    llm = LLM(model, weight_transfer_config=WeightTransferConfig(backend="ps_torch"))
    llm.init_weight_transfer_engine({"init_info": {"server": "trainer:50051"}})  # more by PS_* variables
    version = update(llm, version=40)  # waits for an edition with so many updates

vLLM finds the engine by itself: the package has an entry point in the group vllm.general_plugins, which calls
`register` in each of vLLM's processes. The first of an engine's workers follows the job, and hands the weights to the
others through vLLM's own group, so that all have one version. The trainer sends nothing and knows no engine.

The interface is that of vllm/distributed/weight_transfer/{base,factory}.py in vLLM 0.25 to 0.33. Tests hold this file
against facts from the sources of these releases, and have a stand-in with that interface, because vLLM needs a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from ps_protocol.errors import PSError, Unsupported
from ps_worker.engines import loaded_versions
from ps_worker.followed_model import WeightFeed, subscribe

BACKEND = "ps_torch"


@dataclass
class FollowInfo(base.WeightTransferInitInfo):
    """What to follow: `init_info` of vLLM. `names` has the checkpoint's name of a tensor by the job's name."""

    server: str | None = None
    job: str | None = None
    wire: str = "bfloat16"
    names: dict[str, str] = field(default_factory=dict)


@dataclass
class WantedVersion(base.WeightTransferUpdateInfo):
    """Which weights to load: `update_info` of vLLM. It waits `timeout` seconds for so many updates."""

    version: int = 0
    timeout: float = 600.0
    report: str = ""  # where loaded_versions.py waits for the version that was loaded


class FeedTransferEngine(base.WeightTransferEngine[FollowInfo, WantedVersion]):
    """Loads a job's newest weights into a worker's model.

    Attributes:
        version: The version of the model's weights; -1 where they are not those of training, as after a start.
    """

    init_info_cls = FollowInfo
    update_info_cls = WantedVersion
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.version = -1
        self._feed: WeightFeed | None = None
        self._names: dict[str, str] = {}
        self._is_updating, self._received = False, -1

    def init_transfer_engine(self, init_info: FollowInfo) -> None:
        """Begins to follow a job, in the first worker. Raises InvalidRequest."""
        self.shutdown()
        self._names = init_info.names
        if get_world_group().rank_in_group == 0:
            self._feed = subscribe(init_info.server, init_info.job, wire=init_info.wire)

    def start_weight_update(self) -> None:
        """Makes the model ready to be loaded. It has no version until the update is finished."""
        initialize_layerwise_reload(self.model)
        self._is_updating, self._received, self.version = True, -1, -1

    def receive_weights(self, update_info: WantedVersion) -> None:
        """Loads an edition that is new enough. Raises RuntimeError, on all workers, if there is none."""
        if not self._is_updating:
            raise RuntimeError("start_weight_update comes first")
        try:
            self._received = self._load(update_info)
            if update_info.report and get_world_group().rank_in_group == 0:
                loaded_versions.report(update_info.report, self._received)
        except BaseException:
            self._end_update()
            raise

    def finish_weight_update(self) -> None:
        """Makes the model use the loaded weights. Raises RuntimeError if none were loaded."""
        received = self._received
        self._end_update()
        if received < 0:
            raise RuntimeError("no weights were received since start_weight_update: the model has no version")
        self.version = received

    def shutdown(self) -> None:
        """Ends the feed."""
        if self._feed is not None:
            self._feed.close()
            self._feed = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Raises Unsupported. vLLM before 0.28 calls this of an engine to which a trainer sends the weights."""
        raise Unsupported("parameter servers send the weights: a trainer has nothing to send")

    def _end_update(self) -> None:
        if self._is_updating:
            self._is_updating, self._received = False, -1
            finalize_layerwise_reload(self.model, self.model_config)

    def _load(self, wanted: WantedVersion) -> int:
        group = get_world_group()
        tensors, answer = self._newest(wanted) if group.rank_in_group == 0 else ({}, None)
        answer = group.broadcast_object(answer, src=0)
        if isinstance(answer, str):
            raise RuntimeError(answer)
        version, layout = answer
        for name, dtype, shape in layout:
            here = tensors.get(name)
            tensor = torch.empty(shape, dtype=dtype, device=self.device) if here is None else here.to(self.device)
            group.broadcast(tensor, src=0)
            self.model.load_weights([(self._names.get(name, name), tensor)])
        return int(version)

    def _newest(self, wanted: WantedVersion) -> tuple[dict[str, torch.Tensor], Any]:
        """Returns an edition's tensors, and the message for the other workers: version and layout, or an error."""
        if self._feed is None:
            return {}, "init_weight_transfer_engine comes first: this engine follows no job"
        try:
            edition = self._feed.wait_for(wanted.version, wanted.timeout)
        except PSError as error:
            return {}, str(error)
        tensors = edition.state_dict()
        return tensors, (edition.version, [(name, each.dtype, each.shape) for name, each in tensors.items()])


def register() -> None:
    """Makes the engine known to vLLM, which calls this itself."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FeedTransferEngine)
