"""Resolves names below localhost to this machine, as browsers do (RFC 6761, section 6.3)."""
import socket

_getaddrinfo = socket.getaddrinfo


def _resolve(host, *args, **kwargs):
    name = host.decode() if isinstance(host, bytes) else host
    return _getaddrinfo("127.0.0.1" if name and name.endswith(".localhost") else host, *args, **kwargs)


socket.getaddrinfo = _resolve
