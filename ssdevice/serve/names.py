"""What requests may call this machine, which is checked by every server here."""

from __future__ import annotations

import re

LOOPBACK = "127.0.0.1"
HOSTS = (LOOPBACK, "localhost", "[::1]")
"""Another name is that of a site whose address was changed to ours, so that its scripts could read what we serve (DNS
rebinding)."""


def host_name(host: str) -> str:
    """A header ``Host`` without its port: a tunnel may have another than the server."""
    return re.sub(r":[0-9]+$", "", host.strip()).lower()
