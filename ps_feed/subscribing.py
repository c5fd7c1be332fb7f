"""`subscribe`: a job's weights as numpy arrays, by the settings of `ps_torch.subscribe`, in a process without torch."""

from __future__ import annotations

from collections.abc import Collection

from ps_feed.subscription import Subscription
from ps_protocol.errors import InvalidRequest
from ps_runtime.credentials import Access, access
from ps_runtime.settings import JOB_NAME, JOB_SERVER, SHARED_DIRECTORY, access_settings


def subscribe(
    server: str | None = None,
    job: str | None = None,
    *,
    every: int = 1,
    period: float = 0.0,
    wire: str = "float32",
    changes: bool | None = None,
    parameters: Collection[str] | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    tls_ca: str | None = None,
    token_file: str | None = None,
    insecure: bool | None = None,
) -> Subscription:
    """Follows the weights of a job, as `ps_torch.subscribe` does, in a process that need not have torch.

    What it returns has no models: `wait` and iteration give editions, whose `tensor(name).values` are numpy arrays. Do
    not write to them. numpy has no bfloat16: such a tensor's array has the same bits as uint16, and its `dtype` says
    "bfloat16".

    Args:
        server: HOST:PORT of the coordinator or a relay (PS_SERVER). Several relays have commas between them: where one
            does not answer, the subscription goes on from the next.
        job: The job's name (PS_JOB); "default" by default.
        every: The smallest number of updates between two editions.
        period: The smallest number of seconds between two editions.
        wire: The element type in which float32 weights are transferred and kept: "float32", "bfloat16" or "float16".
        changes: Whether to ask for what changed since the last edition. None: where editions arrive slowly.
        parameters: The names of the tensors to transfer. None: all.
        tls_cert, tls_key, tls_ca, token_file, insecure: As for `ps_torch.connect` (PS_TLS_CERT and so on).

    Raises:
        InvalidRequest: Settings are out of range or contradict each other, or no server is given.

    Example:
        import ps_feed

        with ps_feed.subscribe("trainer:50051") as subscription:
            for edition in subscription:
                arrays = {name: tensor.values for name, tensor in edition.items()}
                engine.load(arrays, edition.version)
    """
    address, shown = reading_from(server, tls_cert, tls_key, tls_ca, token_file, insecure, relays=True)
    return Subscription(
        address,
        JOB_NAME.find(job),
        every=every,
        wire=wire,
        parameters=None if parameters is None else tuple(parameters),
        period=period,
        access=shown,
        changes=changes,
        shared_directory=SHARED_DIRECTORY.find(),
    )


def reading_from(
    server: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    tls_ca: str | None,
    token_file: str | None,
    insecure: bool | None,
    relays: bool = False,
) -> tuple[str, Access]:
    """Returns the coordinator's address and what to show it, for a process that reads and does not train.

    relays: several addresses may be given, with commas between them

    Raises InvalidRequest if there is no address, or if settings contradict each other.
    """
    given = (tls_cert, tls_key, tls_ca, token_file, insecure)  # in the order of these settings
    shown = access(*(setting.find(value) for setting, value in zip(access_settings(), given, strict=True)))
    if relays and server is not None and "," in server:
        address = ",".join(JOB_SERVER.find(each) for each in server.split(","))
    else:
        address = JOB_SERVER.find(server)
    if address is None:
        raise InvalidRequest("a feed needs a server: the argument server='HOST:PORT', or PS_SERVER")
    return address, shown
