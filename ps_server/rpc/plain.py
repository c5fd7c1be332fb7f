"""Messages as plain data and as JSON, for commands that load neither torch nor numpy."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from ps_protocol.convert import seconds


def plain(message: Message) -> dict[str, Any]:
    """Returns a message as plain data, by field name: durations in seconds, times as text, None where not set.

    Deprecated fields are left out: nothing sets them.
    """
    return {
        field.name: _plain(getattr(message, field.name))
        if not field.has_presence or message.HasField(field.name)
        else None
        for field in message.DESCRIPTOR.fields
        if not field.GetOptions().deprecated
    }


def json_text(data: Any, indent: int | None = None) -> str:
    """Returns plain data as JSON, in which NaN and infinities are the texts that protobuf's JSON has for them."""
    return json.dumps(_finite(data), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, Duration):
        return seconds(value)
    if isinstance(value, Timestamp):
        return value.ToJsonString()
    if isinstance(value, Message):
        return plain(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in sorted(value)}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_plain(each) for each in value]
    return value
