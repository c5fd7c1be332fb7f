"""Checks registrations, addresses and names before a coordinator or a shard uses them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from ps_protocol.addresses import is_host, is_host_port
from ps_protocol.errors import InvalidRequest
from ps_protocol.job import JobSpec
from ps_protocol.layout import BucketSpec
from ps_protocol.optimizers import check_hyper_parameters
from ps_protocol.row_optimizers import check_row_optimizer
from ps_protocol.stage_spec import StageSpec
from ps_server.core.extent import check_extent
from ps_server.core.limits import Limits

MAX_LAUNCH_LENGTH = 255
MAX_PLACE_LENGTH = 128  # characters of a worker's or shard's memory_place


def check_job_spec(spec: JobSpec, limits: Limits) -> None:
    """Raises InvalidRequest or LimitExceeded that names a job's first error. Allocates nothing in proportion to the
    job.
    """
    check_extent(spec, limits)
    checked = set()
    for index, group in enumerate(spec.param_groups):
        kind = spec.optimizer_of(index), tuple(sorted(group.items()))
        if kind not in checked:
            check_hyper_parameters(spec.optimizer_of(index), group)
            checked.add(kind)
    for table in spec.tables:
        check_row_optimizer(table.optimizer, table.values)


def check_once(values: Sequence[Hashable], what: str) -> None:
    """Raises InvalidRequest if a value occurs twice.

    what: the beginning of the error, as in "a push names each bucket"
    """
    if len(set(values)) != len(values):
        [(twice, _)] = Counter(values).most_common(1)
        raise InvalidRequest(f"{what} at most once, got {twice!r} twice")


def check_address(address: str, what: str) -> None:
    """Raises InvalidRequest unless this is HOST:PORT."""
    if not is_host_port(address):
        raise InvalidRequest(f"{what} must be HOST:PORT, got {address[:80]!r}")


def check_host(host: str) -> None:
    """Raises InvalidRequest unless this can be a host's name, or is empty."""
    if not is_host(host):
        raise InvalidRequest(f"a host's name has up to 255 letters, digits, '.', '_', ':' and '-', got {host[:80]!r}")


def check_memory_place(place: str) -> None:
    """Raises InvalidRequest unless the text can be a memory place (see memory_place), or is empty."""
    if len(place) > MAX_PLACE_LENGTH or not place.isascii() or not place.isprintable():
        raise InvalidRequest(
            f"memory_place has up to {MAX_PLACE_LENGTH} printable ASCII characters, got {place[:80]!r}"
        )


def check_launch(launch: str) -> None:
    """Raises InvalidRequest unless this can name a launch, or is empty."""
    if len(launch) > MAX_LAUNCH_LENGTH or not launch.isascii() or not launch.isprintable():
        raise InvalidRequest(f"a launch's name has up to 255 printable ASCII characters, got {launch[:80]!r}")


def check_stage(stage: StageSpec, bucket: BucketSpec) -> None:
    """Raises InvalidRequest if a stage cannot train a bucket. It may come from a worker or from a checkpoint."""
    if stage.number < 1:
        raise InvalidRequest(f"bucket {bucket.index}: a stage that follows has a number from 1, got {stage.number}")
    if len(stage.group_of_slice) != len(bucket.slices):
        raise InvalidRequest(
            f"bucket {bucket.index}: expected the groups of {len(bucket.slices)} slices, "
            f"got {len(stage.group_of_slice)}"
        )
    if {group for group in stage.group_of_slice if group is not None} != stage.groups.keys():
        raise InvalidRequest(f"bucket {bucket.index}: expected hyper-parameters of the groups that have slices in it")
    if any(position not in stage.trained for position in stage.kept):
        raise InvalidRequest(f"bucket {bucket.index}: slices without a group keep no state, got {sorted(stage.kept)}")
    check_hyper_parameters(stage.optimizer, {})
    for values in stage.groups.values():
        check_hyper_parameters(stage.optimizer, values)
