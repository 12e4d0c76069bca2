"""Where a coordinator may be sent: the addresses that a join's URL may lead to.

A join makes the coordinator call an address that somebody else chose. Names are resolved where the connection is made
and the connection goes to the address that was judged, so a name that changes meanwhile changes nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from updater.server.security import ConfigurationError, is_loopback

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
#: Credentials of the machine itself can be asked for there, on the clouds that use no link-local address for it.
_METADATA = frozenset(
    ipaddress.ip_address(each) for each in ("fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "168.63.129.16")
)


class AddressBarred(OSError):
    """No address of a name may be called."""


@dataclass(frozen=True, slots=True)
class Networks:
    """`allowed` empty: this machine alone if `loopback_only`, else every address. Link-local addresses, those of
    metadata services and groups are never allowed."""

    allowed: tuple[Network, ...] = ()
    loopback_only: bool = False

    @classmethod
    def of(cls, bound: str, texts: Sequence[str]) -> Networks:
        """For a coordinator bound to `bound`. `texts`: CIDR networks. Raises ConfigurationError."""
        try:
            networks = tuple(ipaddress.ip_network(text) for text in texts)
        except ValueError as error:
            raise ConfigurationError(f"--allow-network: {error}") from None
        return cls(networks, is_loopback(bound))

    def allows(self, text: str) -> bool:
        """Of one literal IP address."""
        address = _inner(ipaddress.ip_address(text))
        if address.is_link_local or address.is_multicast or address in _METADATA:
            return False
        if self.allowed:
            return any(address in network for network in self.allowed)
        # The unspecified address leads to this machine.
        return not self.loopback_only or address.is_loopback or address.is_unspecified

    async def resolve(self, host: str, port: int) -> list[str]:
        """The literal addresses of `host` that may be called, at least one. Raises AddressBarred, OSError."""
        try:
            found = [str(ipaddress.ip_address(host))]
        except ValueError:
            loop = asyncio.get_running_loop()
            infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found = list(dict.fromkeys(str(info[4][0]) for info in infos))
        good = [each for each in found if self.allows(each)]
        if not good:
            raise AddressBarred(f"{host} is outside the networks that a replica may join from")
        return good


def _inner(address: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for, if it does."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address
