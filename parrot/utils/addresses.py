"""Addresses and names of hosts."""

import ipaddress
import re

MAX_HOST_NAME = 253  # characters
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)", re.IGNORECASE)


def is_host(text: str) -> bool:
    """Whether the text is an IP address or a DNS name. Such a text is safe as the host of a URL."""
    if is_address(text):
        return True
    labels = text.removesuffix(".").split(".")
    return len(text) <= MAX_HOST_NAME and all(_LABEL.fullmatch(label) for label in labels)


def is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text


# Cloud metadata services, which give a machine's credentials to any process on the machine.
_METADATA = frozenset(
    map(
        ipaddress.ip_address,
        (
            *("169.254.169.254", "169.254.170.2", "169.254.170.23", "100.100.100.200"),
            *("168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd00:ec2::23"),
        ),
    )
)


def is_metadata(address: str) -> bool:
    """Whether the IP address is a cloud's metadata service. False for host names."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return (getattr(found, "ipv4_mapped", None) or found) in _METADATA


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to a server that binds `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
