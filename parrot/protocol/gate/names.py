"""Addresses and names of hosts."""

import ipaddress
import re

MAX_HOST_NAME = 253  # characters
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)", re.IGNORECASE)


def is_host(text: str) -> bool:
    """Whether it is an IP address or a DNS name, and so nothing else in a URL."""
    if is_address(text):
        return True
    labels = text.removesuffix(".").split(".")
    return len(text) <= MAX_HOST_NAME and all(_LABEL.fullmatch(label) for label in labels)


def is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to a server that binds `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
