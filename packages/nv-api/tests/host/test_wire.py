"""Wire: frames arrive in order, whatever the front end reads."""

import socket

from nv_api.host.frames import FROM_HOST, Accepted, FrameBuffer, Refused, Stop, packed
from nv_api.host.wire import Wire


def test_what_the_front_end_has_not_read_is_kept_in_order():
    ours, theirs = socket.socketpair()
    wire = Wire(theirs)
    frames = [Refused(number, "ValueError", "x" * 200_000) for number in range(100)]
    for frame in frames:  # more than the buffers of the system take
        wire.send(frame)
    buffer, found = FrameBuffer(), []
    while len(found) < len(frames):
        found += map(FROM_HOST.decode, buffer.push(ours.recv(1 << 20)))
        assert wire.receive(0.0) == []  # sends what there is room for
    assert found == frames
    wire.send(Accepted(5))
    assert FROM_HOST.decode(buffer.push(ours.recv(100))[0]) == Accepted(5)
    wire.close()
    ours.close()


def test_a_frame_that_has_come_is_received_without_a_wait():
    ours, theirs = socket.socketpair()
    wire = Wire(theirs)
    assert wire.receive(0.0) == []
    ours.sendall(packed(Stop()))
    assert wire.receive(0.0) == [Stop()]
    wire.ring()
    assert wire.receive(0.0) == []
    ours.close()
    assert wire.receive(0.0) == []
    assert not wire.is_open
    wire.send(Accepted(1))  # it is not read any more
    wire.close()
