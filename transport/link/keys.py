"""CURVE keys, as Z85 text of 40 characters each."""

from __future__ import annotations

import string
from collections.abc import Iterable
from dataclasses import dataclass, field

import zmq

_Z85 = frozenset(string.digits + string.ascii_letters + ".-:+=^!/*?&<>()[]{}@%$#")


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The server's pair, and the public keys of the clients that may connect; the handshake rejects all others.

    While a client is connected, no client with another key can use its name.
    """

    public: str
    secret: str = field(repr=False)
    clients: frozenset[str]

    def __init__(self, public: str, secret: str, clients: Iterable[str]) -> None:
        for name, value in (("public", public), ("secret", secret), ("clients", frozenset(clients))):
            object.__setattr__(self, name, value)
        for key in (public, secret, *self.clients):
            _check(key)


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """The client's pair, and the server's public key."""

    public: str
    secret: str = field(repr=False)
    server: str

    def __post_init__(self) -> None:
        for key in (self.public, self.secret, self.server):
            _check(key)


def generate_keypair() -> tuple[str, str]:
    """Return a new public key and its secret key."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _check(key: str) -> None:
    """Raise `ValueError` for text that is not a key. The text may be a secret, so the error does not contain it."""
    if len(key) != 40:
        raise ValueError(
            f"a CURVE key has 40 characters and this one has {len(key)}. Make pairs with generate_keypair()."
        )
    if not _Z85.issuperset(key):
        raise ValueError("a CURVE key has a character that Z85 does not. Make pairs with generate_keypair().")
