"""Messages between the supervisor and its processes: whole, in order, and nobody waits for one that does not read."""

from __future__ import annotations

import pickle
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestream.errors import CacheFullError
from cachestream.worker.channel import Channel, Message, SupervisorGoneError, SupervisorLink, _framed, _Frames
from tests.worker.support import DEADLINE_S, wait_until


class Process:
    """The other end of a `Channel`, which notes what it hears."""

    def __init__(self, end: socket.socket) -> None:
        self.end, self.heard, self.has_ended = end, list[tuple[Any, ...]](), threading.Event()
        self.link = SupervisorLink(end, lambda *message: self.heard.append(message), self.has_ended.set)


@pytest.fixture
def pair() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield Channel(ours), theirs
    for end in (ours, theirs):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)  # so that who listens ends
        end.close()


def hear(channel: Channel, count: int = 1) -> list[Message]:
    found: list[Message] = []

    def is_enough() -> bool:
        channel.flush()
        found.extend(channel.receive() or ())
        return len(found) >= count

    wait_until(is_enough, f"{count} messages have come")
    return found


@given(
    st.lists(st.binary(max_size=300) | st.integers(), max_size=6), st.lists(st.integers(1, 400), min_size=1)
)
def test_messages_come_whole_and_in_order_in_whatever_pieces_they_arrive(
    messages: list[Any], sizes: list[int]
) -> None:
    data, frames, found, number = b"".join(map(_framed, messages)), _Frames(), [], 0
    while data:
        size = sizes[number % len(sizes)]
        number += 1
        found += frames.add(data[:size])
        data = data[size:]
    assert found == messages


def test_a_process_that_does_not_read_holds_up_nobody_and_gets_all_of_it_later(
    pair: tuple[Channel, socket.socket],
) -> None:
    channel, end = pair
    large, began_s = b"x" * 3_000_000, time.monotonic()
    for number in range(5):
        channel.tell("large", number, large)
    channel.answer(7, "done")
    assert channel.is_blocked
    assert channel.receive() == []
    assert time.monotonic() - began_s < 10.0, "nothing waited"
    process = Process(end)

    def has_come() -> bool:
        channel.flush()
        return len(process.heard) == 5

    wait_until(has_come, "all has come")
    assert [(kind, number, len(data)) for kind, number, data in process.heard] == [
        ("large", number, len(large)) for number in range(5)
    ]

    def waits_no_more() -> bool:
        channel.flush()
        return not channel.is_blocked

    wait_until(waits_no_more, "nothing waits any more")


def test_each_question_gets_its_own_answer_in_whatever_order_they_are_answered(
    pair: tuple[Channel, socket.socket],
) -> None:
    channel, end = pair
    link = Process(end).link
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(link.ask, "square", number) for number in range(4)]
        for _, number, (given_number,) in reversed(hear(channel, 4)):
            channel.answer(number, given_number**2)
        assert [one.result(DEADLINE_S) for one in asked] == [0, 1, 4, 9]


def test_an_answer_that_is_an_error_is_raised(pair: tuple[Channel, socket.socket]) -> None:
    channel, end = pair
    link = Process(end).link
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(link.ask, "publish")
        ((_, number, _),) = hear(channel)
        channel.answer(number, CacheFullError("the disk is full"))
        with pytest.raises(CacheFullError, match="the disk is full"):
            asked.result(DEADLINE_S)


def test_a_question_that_was_given_up_leaves_its_late_answer_to_nobody(
    pair: tuple[Channel, socket.socket],
) -> None:
    channel, end = pair
    process = Process(end)
    beats = iter([True, True, False])
    assert process.link.ask("reserve", beat=lambda: next(beats), every_s=0.001) is None
    with pytest.raises(SupervisorGoneError, match=r"did not answer 'reserve' within 0\.01 s"):
        process.link.ask("reserve", every_s=0.001, timeout_s=0.01)
    first, second = hear(channel, 2)
    for _, number, _ in (first, second):
        channel.answer(number, "late")
    channel.tell("news")
    wait_until(lambda: process.heard == [("news",)], "only the news is heard")


def test_the_end_of_the_supervisor_is_told_and_raised_where_an_answer_is_waited_for_or_asked_for_later(
    pair: tuple[Channel, socket.socket],
) -> None:
    channel, end = pair
    process = Process(end)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(process.link.ask, "publish")
        hear(channel)
        assert not process.has_ended.is_set()
        channel.close()
        with pytest.raises(SupervisorGoneError):
            asked.result(DEADLINE_S)
    assert process.has_ended.wait(DEADLINE_S)
    with pytest.raises(SupervisorGoneError):
        process.link.ask("publish")
    with pytest.raises(SupervisorGoneError):
        process.link.tell("want", 5)


def test_the_end_of_a_process_is_told_after_its_last_message_and_what_is_said_to_it_is_lost(
    pair: tuple[Channel, socket.socket],
) -> None:
    channel, end = pair
    end.sendall(_framed(("votes", 0, ("last",))) + _framed(("half", 0, ()))[:-1])
    end.close()
    assert channel.receive() == [("votes", 0, ("last",))]
    assert channel.receive() is None, "the half of a message is none"
    channel.tell("units", b"x" * 1_000_000)
    channel.answer(1, None)
    assert not channel.is_blocked


def test_a_message_is_its_length_and_a_pickle() -> None:
    framed = _framed(("want", 0, (5,)))
    assert struct.unpack("<Q", framed[:8]) == (len(framed) - 8,)
    assert pickle.loads(framed[8:]) == ("want", 0, (5,))
