"""The socket of a server. Nothing heavy is imported here: a port in use is known before anything is loaded."""

from __future__ import annotations

import errno
import ipaddress
import socket

from gnnlm.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"--host {host}: no such address ({error}); the usual one is 127.0.0.1") from error
    found = socket.socket(family, kind, protocol)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(address)
        found.listen(256)
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {host} is in use; name another with --port, 0 for any free one"
            ) from error
        raise ConfigError(f"cannot listen on {host}, port {port}: {error.strerror}") from error
    return found


def address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(listening: socket.socket) -> bool:
    return ipaddress.ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback
