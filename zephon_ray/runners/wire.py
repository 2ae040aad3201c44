"""Objects between a process and its worker processes, over a socket pair.

Both ends run the same code and nobody else can reach the socket, which is why it may carry pickles; nothing here is stored.
Buffers of arrays travel beside the pickle: they are sent from where they lie and received into where they stay.
"""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

import numpy as np

_COUNT = struct.Struct("<q")


def send(sock: socket.socket, value: object) -> None:
    """Send one object.

    Raises:
        OSError: the other end is closed.
    """
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    sizes = len(head), *(view.nbytes for view in views)
    sock.sendall(struct.pack(f"<q{len(sizes)}q", len(sizes), *sizes) + head)
    for view in views:
        sock.sendall(view)


def receive(sock: socket.socket) -> Any:
    """Wait for one object. Its arrays can be written to.

    Raises:
        EOFError: the other end is closed.
    """
    (count,) = _COUNT.unpack(_read(sock, _COUNT.size))
    sizes = struct.unpack(f"<{count}q", _read(sock, count * _COUNT.size))
    head, *buffers = [_read(sock, size) for size in sizes]
    return pickle.loads(head, buffers=buffers)  # noqa: S301  see above: it comes from our own process


def _read(sock: socket.socket, size: int) -> memoryview:
    view = np.empty(size, np.uint8).data  # not zeroed, unlike a bytearray
    got = 0
    while got < size:
        try:
            part = sock.recv_into(view[got:], size - got, socket.MSG_WAITALL)
        except ConnectionError as error:
            raise EOFError(str(error)) from error
        if not part:
            raise EOFError("closed by the other end")
        got += part
    return view
