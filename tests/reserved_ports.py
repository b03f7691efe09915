"""Ports for servers that are started later, or never: no other test gets them."""

import socket

_reserved: list[socket.socket] = []


def reserved_port() -> int:
    """A port of 127.0.0.1 that nobody listens at, and that the system gives to nobody until this process ends.

    The port stays bound to a socket that does not listen: connections are refused, and a server that sets SO_REUSEADDR,
    as asyncio, uvicorn and Ray do, can listen. A port that is free and closed again is given to the next socket
    that asks for any, in this test or in one of another process.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    _reserved.append(reserved)
    port: int = reserved.getsockname()[1]
    return port
