"""A reader that asks for small messages gets buckets in several, in the edition's own memory, whatever servers send."""

from __future__ import annotations

import itertools
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from torch import nn

import ps_torch as ps
from ps_feed import subscription
from ps_feed.edition import Arriving, Contents, Damaged, EditionArrays
from ps_feed.edition_client import JoinedParts, receive
from ps_protocol.changes import apply_change, encode_change
from ps_protocol.framing import Buffer, split_message
from ps_protocol.messages.editions import (
    LEAST_PART_BYTES,
    EditionBegin,
    EditionBucket,
    EditionCall,
    EditionMessage,
    in_messages,
    read_edition_call,
    read_edition_part,
    write_edition_call,
    write_edition_part,
)
from tests.tools.cases import crossed
from tests.tools.cluster import Cluster
from tests.tools.editions import CONTENTS, ORIGIN, bucket
from tests.tools.followed_trainer import relay

SIZES = {index: CONTENTS.size(bucket) for index, bucket in CONTENTS.buckets.items()}


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize(("relays", "changes"), crossed([0, 1], [False, True]))
def test_buckets_come_in_messages_as_small_as_a_reader_wants(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch, relays: int, changes: bool
) -> None:
    monkeypatch.setattr(subscription, "PART_BYTES", LEAST_PART_BYTES)
    came: list[EditionMessage] = []

    class Watched(JoinedParts):
        def add(self, part: EditionMessage) -> EditionBucket | None:
            came.append(part)
            return super().add(part)

    monkeypatch.setattr("ps_feed.edition_client.JoinedParts", Watched)
    torch.manual_seed(5)
    model = nn.Linear(400, 500)
    with ExitStack() as stack:
        session = stack.enter_context(shared.connect("sync", job=job))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        model, optimizer = session.prepare(model, optimizer, bucket_bytes=2**19)
        address = shared.address
        for _ in range(relays):
            address = stack.enter_context(relay(address)).address
        with ps.subscribe(address, job, changes=changes) as feed:
            feed.wait_for()
            for version in (1, 2):
                model(torch.randn(8, 400)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                edition = feed.wait_for(version)
                assert torch.equal(edition.tensor("weight"), session.unwrap(model).weight)
    sizes = [len(each) for part in came if (each := part.more or (part.bucket and part.bucket.payload)) is not None]
    assert max(sizes) == LEAST_PART_BYTES
    assert sum(part.more is not None for part in came) > 10
    assert not changes or any(part.bucket.base is not None for part in came if part.bucket)


def test_a_call_says_how_large_a_message_may_be_and_not_how_small() -> None:
    for wanted, got in ((0, 0), (1, LEAST_PART_BYTES), (LEAST_PART_BYTES + 1, LEAST_PART_BYTES + 1)):
        call = EditionCall("job", "1", 0, 1, "float32", (0,), {}, wanted)
        assert read_edition_call(write_edition_call(call)) == call._replace(part_bytes=got)


def messages(one: EditionBucket, most: int) -> Iterator[EditionMessage]:
    """A bucket in messages, as they travel."""
    first, later = in_messages(one, most)
    for part in (EditionMessage(1, bucket=first), *(EditionMessage(1, more=each) for each in reversed(later))):
        assert len(part.more or first.payload) <= most
        yield read_edition_part(*split_message(write_edition_part(ORIGIN, part).whole()))


def received(arriving: Arriving, *parts: EditionMessage, begins: int = len(SIZES)) -> EditionArrays:
    def take(one: EditionBucket, timeline: int) -> None:
        arriving.take(one, timeline, "an edition")

    begin = EditionMessage(1, EditionBegin(1, 0, begins))
    if not receive((begin, *parts), take, lambda *_: None, arriving.memory_for):
        raise Damaged("cut off")
    return arriving.complete("1", 0)


@pytest.mark.parametrize("most", [1, 24, 10_000])
def test_parts_make_the_edition_that_was_sent(most: int) -> None:
    sent = [bucket(index, index + 0.5) for index in SIZES]
    parts = itertools.chain.from_iterable(messages(each, most) for each in sent)
    edition = received(Arriving(CONTENTS, None), *parts)
    for each in sent:
        assert edition.elements(each.bucket).tobytes() == each.payload


def test_a_bucket_in_parts_lies_in_the_edition_from_the_first_one_on() -> None:
    arriving = Arriving(CONTENTS, None)
    taken: list[Buffer] = []
    sent = messages(bucket(0, 7.0), 24)
    receive(sent, lambda one, _: taken.append(one.payload), lambda *_: None, arriving.memory_for)
    [payload] = taken
    assert np.shares_memory(np.frombuffer(payload, np.uint8), arriving._spaces[CONTENTS.buckets[0].space])


def test_a_change_is_made_in_the_edition_and_in_no_other_memory() -> None:
    size = 2**22
    base, new = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    new[1::4], new[7::1000] = 3, 9
    change, out = encode_change(base.data, new.data, 4), np.empty(size, np.uint8)
    assert change is not None
    tracemalloc.start()
    try:
        assert apply_change(change.payload, base.data, 4, out) is out
        assert tracemalloc.get_traced_memory()[1] < size / 4, "numpy and bytes are traced"
    finally:
        tracemalloc.stop()
    assert np.array_equal(out, new)


def test_parts_that_no_server_sends_are_refused() -> None:
    first, second = list(messages(bucket(0, 7.0), 40)), list(messages(bucket(1, 8.0), 40))
    assert len(first) == 2
    opened = first[0].bucket
    assert opened is not None
    too_large = EditionMessage(1, bucket=opened._replace(payload_bytes=2**40))
    longer, other = EditionMessage(1, more=bytes(25)), opened._replace(payload_bytes=41)
    for parts in (
        [first[1]],
        [first[0], second[0]],
        [first[0], longer],
        [too_large],
        [EditionMessage(1, bucket=other), EditionMessage(1, more=b"0")],
        [first[0], EditionMessage(1, more=bytes(24))],  # its checksum is another one
    ):
        with pytest.raises(Damaged):
            received(Arriving(CONTENTS, None), *parts)
    with pytest.raises(Damaged, match="cut off"):
        received(Arriving(CONTENTS, None), first[0], begins=0)


def test_a_bucket_that_is_there_is_not_written_again() -> None:
    arriving, again = Arriving(CONTENTS, None), list(messages(bucket(0, 9.0), 40))
    with pytest.raises(Damaged, match="came twice"):  # a feed goes on after that, and not after InvalidRequest
        received(arriving, *messages(bucket(0, 7.0), 40), *again)
    assert not again[0].bucket or arriving.memory_for(again[0].bucket) is None
    space = arriving._spaces[CONTENTS.buckets[0].space]
    assert space[: SIZES[0]].tobytes() == bucket(0, 7.0).payload


def test_a_bucket_in_another_type_of_the_same_size_is_refused() -> None:
    contents = Contents(CONTENTS.spec, None, "bfloat16")
    payload = bytes(contents.size(contents.buckets[0]))
    asked = EditionBucket(0, 1, "bfloat16", zlib.crc32(payload), payload)
    arriving = Arriving(contents, None)
    for other in ("float16", ""):
        with pytest.raises(Damaged, match="expected bucket 0 as bfloat16, got float"):
            arriving.take(asked._replace(wire_format=other), 0, "an edition")
    arriving.take(asked, 0, "an edition")
    assert 0 not in arriving.missing
