"""Which certificate authorities every TLS connection of this library trusts."""

from __future__ import annotations

import ssl


def client_tls_context() -> ssl.SSLContext:
    """A context for HTTP/1.1 clients that verifies the server's certificate and host name.

    Trusted are the authorities of the operating system; OpenSSL's environment variables `SSL_CERT_FILE` and
    `SSL_CERT_DIR` replace them. Loading them takes milliseconds, so callers keep the context.
    """
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
