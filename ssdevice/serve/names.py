"""What requests may call this machine, which every server here checks, and the socket that they
come to.
"""

import errno
import re
import socket

from ssdevice.errors import InputError

LOOPBACK = "127.0.0.1"
HOSTS = (LOOPBACK, "localhost", "[::1]")
"""Another name is that of a site whose address was changed to ours, so that its scripts could read
what we serve (DNS rebinding).
"""


def host_name(host: str) -> str:
    """A header ``Host`` without its port: a tunnel may have another than the server."""
    return re.sub(r":[0-9]+$", "", host.strip()).lower()


def listen(host: str, port: int) -> socket.socket:
    """The socket of a server.

    Raises InputError if it cannot have the address or the port (0: any free one).
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InputError(f"--port {port} is taken; choose another (0: any free one)") from error
        raise InputError(f"--port {port} on {host} cannot be used: {error.strerror}") from error
