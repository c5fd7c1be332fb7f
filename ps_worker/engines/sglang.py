"""SGLang follows a job: this process makes it load each version from a directory. Needs only a running SGLang.

    python -m ps_torch.engines.sglang --server trainer:50051 --engine http://127.0.0.1:30000 \\
        --folder /dev/shm/weights --base /models/llama

SGLang names the version of its weights in each answer, as `meta_info["weight_version"]`. After a restart of SGLang that
is "default", or the value of --weight-version, until this process has given it the newest weights, which happens within
--look seconds. So old weights never pass for new ones.

The interface is that of SGLang 0.5.23: POST /update_weights_from_disk and GET /model_info in
sglang/srt/entrypoints/http_server.py, UpdateWeightFromDiskReqInput in sglang/srt/managers/io_struct.py.
"""

from __future__ import annotations

import argparse
import json
import logging
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from ps_protocol.errors import InvalidRequest, PSError, Unreachable
from ps_worker.engines.folders import Names, label, saved, tidy
from ps_worker.followed_model import WeightFeed, subscribe

log = logging.getLogger("ps_worker")

LOAD_SECONDS = 1800.0  # the longest that SGLang may load


class DiskFollower:
    """Has one SGLang load each newest version of a job.

    Args:
        feed: From `ps_torch.subscribe`.
        engine: The engine's address, as http://HOST:PORT.
        folder: A directory that the engine sees under the same name. The last versions are in JOB/WIRE/VERSION there.
        base: The engine's own checkpoint: its files that are no weights are put beside the weights.
        max_shard_bytes: The largest size of a file.
        api_key: The engine's --api-key or --admin-api-key.
        names: The engine's names of tensors, where they are not the job's: as for `feed.save`. Two followers that have
            one folder and the same names have to have the same functions in a `MadeOf`, too.
    """

    def __init__(
        self,
        feed: WeightFeed,
        engine: str,
        folder: str | Path,
        base: str | Path | None = None,
        max_shard_bytes: int = 5 * 10**9,
        api_key: str | None = None,
        names: Names | None = None,
    ) -> None:
        self.feed, self.engine, self.folder = feed, engine.rstrip("/"), Path(folder).absolute()
        self._base = None if base is None else Path(base)
        self._most, self._api_key, self._names = max_shard_bytes, api_key, names

    def update(self, timeout: float = 60.0) -> bool:
        """Gives the engine the newest weights; False: it has them. Raises Unreachable if there are no weights, or no
        engine answers, and InvalidRequest with the words of an engine that refuses them.
        """
        edition = self.feed.wait_for(timeout=timeout)
        version = label(edition, self._names)
        if self._ask("/model_info").get("weight_version") == version:
            return False
        place = saved(edition, self.folder, self._base, self._most, self._names)
        try:
            self._ask("/update_weights_from_disk", {"model_path": str(place), "weight_version": version})
        finally:
            tidy(place)  # even if the engine refuses the version: the folder may lie in memory
        return True

    def follow(self, ended: threading.Event, look: float = 1.0) -> None:
        """Updates the engine until the event is set or the job has ended. An engine that was restarted is updated too.

        look: seconds between two looks
        """
        while not ended.is_set():
            is_last = self.feed.ended
            try:
                if self.update():
                    log.info("%s has version %d", self.engine, self.feed.version)
            except (PSError, OSError) as error:
                log.warning("%s cannot be given the newest weights: %s", self.engine, error)
            else:
                if is_last:
                    return
            ended.wait(look)

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        request = urllib.request.Request(f"{self.engine}{path}", json.dumps(body).encode() if body else None, headers)
        try:
            with urllib.request.urlopen(request, timeout=LOAD_SECONDS if body else 30.0) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            said = error.read()[:500].decode("utf-8", "replace")
            raise InvalidRequest(f"{self.engine}{path}: {error.code} {said}") from None
        except (OSError, ValueError, TypeError) as error:
            raise Unreachable(f"{self.engine}{path}: {error}") from None


def main() -> None:
    """Runs until the job has ended."""
    parser = argparse.ArgumentParser(description="Have an SGLang load each newest version of a job.")
    parser.add_argument("--server", help="HOST:PORT of the coordinator (PS_SERVER)")
    parser.add_argument("--job", help="the job's name (PS_JOB, default)")
    parser.add_argument("--wire", default="bfloat16", help="element type of transfer and files (%(default)s)")
    parser.add_argument("--every", type=int, default=1, help="updates between two versions, at least (%(default)s)")
    parser.add_argument("--engine", required=True, help="http://HOST:PORT of the engine")
    parser.add_argument("--folder", type=Path, required=True, help="where this and the engine see files")
    parser.add_argument("--base", type=Path, help="the engine's own checkpoint, for its configuration")
    parser.add_argument("--look", type=float, default=1.0, help="seconds between two looks (%(default)s)")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with subscribe(arguments.server, arguments.job, wire=arguments.wire, every=arguments.every) as feed:
        DiskFollower(feed, arguments.engine, arguments.folder, arguments.base).follow(threading.Event(), arguments.look)


if __name__ == "__main__":
    main()
