"""What a fetcher may contact: URLs without surprises, and addresses that are public or that the operator names.

A URL has one reading here, or is refused: no user names, no control characters, no IPv4 addresses but four decimal
numbers, no zones. Names are resolved by the caller, who checks each address with `AddressRules.allows` and
connects to that address.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import quote

from quire.engine.protocol.errors import ConfigError, InvalidParameter

Address = IPv4Address | IPv6Address

MAX_URL_CHARACTERS = 8192
PORTS = {"http": 80, "https": 443}
"""The schemes that are fetched, with their ports."""
_MAX_HOST_CHARACTERS = 253
_FIRST_USER_PORT = 1024
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://([^/?#]*)([^?#]*)(\?[^#]*)?(?:#.*)?", re.IGNORECASE)
_AUTHORITY = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]+)(?::([0-9]{1,5}))?")
_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*")
_UNSAFE = re.compile(r"[\x00-\x20\x7f\\\ud800-\udfff]")
_IS_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
"""A last label by which URL parsers take a host for an IPv4 address."""
_PATH_CHARACTERS = "!$%&'()*+,/:;=?@[]~|^`{}\"<>"
"""Kept as they are: servers and signatures of URLs expect the bytes that the client gave."""

# The special-purpose registries of IANA (RFC 6890), multicast, and what clouds reach their own services by.
_REFUSED_V4 = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",
            "10.0.0.0/8",
            "100.64.0.0/10",  # carrier-grade NAT; Alibaba's metadata
            "127.0.0.0/8",
            "168.63.129.16/32",  # Azure's host
            "169.254.0.0/16",  # link-local; metadata of most clouds
            "172.16.0.0/12",
            "192.0.0.0/24",  # IETF; Oracle's metadata
            "192.0.2.0/24",
            "192.88.99.0/24",
            "192.168.0.0/16",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/4",
            "240.0.0.0/4",
        ),
    )
)
_GLOBAL_V6 = IPv6Network("2000::/3")
_REFUSED_V6 = tuple(
    map(
        IPv6Network,
        (
            "2001::/23",  # Teredo, ORCHID, benchmarks
            "2001:db8::/32",
            "2002::/16",  # 6to4
            "3fff::/20",
        ),
    )
)
_NAT64 = IPv6Network("64:ff9b::/96")
_ISATAP = (0x00005EFE, 0x02005EFE)
"""The upper half of an interface identifier whose lower half is an IPv4 address (RFC 5214)."""


@dataclass(frozen=True)
class FetchTarget:
    """Where a URL leads."""

    scheme: str
    host: str
    """ASCII, in lower case; addresses in their usual notation, without brackets."""
    port: int
    path: str
    """ASCII: path and query."""

    @property
    def address(self) -> Address | None:
        """The host, if it is an address."""
        return ip_address(self.host) if ":" in self.host or self.host.rpartition(".")[2].isdigit() else None

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"

    @property
    def authority(self) -> str:
        """Host and port, as in a Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"


def parse_url(url: str) -> FetchTarget:
    """Raises `InvalidParameter` for a URL that is not plainly http or https."""
    if len(url) > MAX_URL_CHARACTERS:
        raise InvalidParameter(f"the URL has {len(url)} characters, and at most {MAX_URL_CHARACTERS} are allowed")
    if _UNSAFE.search(url):
        raise InvalidParameter("the URL has spaces, control characters or backslashes")
    if (parts := _URL.fullmatch(url)) is None:
        raise InvalidParameter("the URL is invalid: it must be like https://host/path")
    scheme, authority, path, query = parts[1].lower(), parts[2], parts[3], parts[4] or ""
    if scheme not in PORTS:
        raise InvalidParameter(f"URLs must begin with https://, http:// or data:, not {scheme}:")
    if "@" in authority:
        raise InvalidParameter("the URL has a user name or a password, which are not supported")
    if (matched := _AUTHORITY.fullmatch(authority)) is None:
        raise InvalidParameter("the URL has an invalid host or port")
    port = int(matched[2] or PORTS[scheme])
    if port not in PORTS.values() and not _FIRST_USER_PORT <= port < 2**16:
        raise InvalidParameter(f"port {port} of the URL is not supported: use 80, 443 or a port from 1024 on")
    path = quote(path or "/", safe=_PATH_CHARACTERS) + quote(query, safe=_PATH_CHARACTERS)
    return FetchTarget(scheme, _host(matched[1]), port, path)


def _host(host: str) -> str:
    """A host in its usual form. Raises `InvalidParameter`."""
    if host.startswith("["):
        try:
            return str(IPv6Address(host[1:-1] if "%" not in host else ""))
        except ValueError:
            raise InvalidParameter("the URL has an invalid IPv6 address; zones are not supported") from None
    if len(host) > _MAX_HOST_CHARACTERS:  # before IDNA, which is slow
        raise InvalidParameter("the URL's host name is too long")
    try:
        name = host.encode("idna").decode("ascii").lower().removesuffix(".")
    except UnicodeError:
        raise InvalidParameter("the URL has an invalid host name") from None
    if not _NAME.fullmatch(name):
        raise InvalidParameter("the URL has an invalid host name")
    if _IS_NUMBER.fullmatch(name.rpartition(".")[2]):
        try:
            return str(IPv4Address(name))
        except ValueError:
            raise InvalidParameter(
                "IPv4 addresses in URLs must be four decimal numbers without leading zeros"
            ) from None
    return name


def is_public(address: Address) -> bool:
    """Whether anybody on the internet may have this address, also if it is an IPv4 address in an IPv6 address."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _REFUSED_V4)
    if address.scope_id is not None:
        return False
    if address.ipv4_mapped is not None:
        return is_public(address.ipv4_mapped)
    last = IPv4Address(int(address) & 0xFFFFFFFF)
    if address in _NAT64:
        return is_public(last)
    if int(address) >> 32 & 0xFFFFFFFF in _ISATAP and not is_public(last):
        return False
    return address in _GLOBAL_V6 and not any(address in network for network in _REFUSED_V6)


@dataclass(frozen=True)
class AddressRules:
    """What the operator allows. Make it with `parse`."""

    domains: frozenset[str] = frozenset()
    """Hosts; if there are any domains or suffixes, no others are allowed. They may have any address."""
    suffixes: tuple[str, ...] = ()
    """Ends of hosts, beginning with a dot. Their addresses must be public, or in `networks`: who may choose a name
    below such a suffix may choose its address, too."""
    networks: tuple[IPv4Network | IPv6Network, ...] = ()
    """Allowed in addition to public addresses."""

    @classmethod
    def parse(cls, domains: Sequence[str] = (), networks: Sequence[str] = ()) -> AddressRules:
        """From --allowed-media-domains, such as images.example.com or *.example.com, and --allowed-media-networks,
        such as 10.1.0.0/16. Raises `ConfigError`.
        """
        hosts: list[str] = []
        suffixes: list[str] = []
        ranges = []
        for domain in domains:
            try:
                (suffixes if domain.startswith("*.") else hosts).append(_host(domain.removeprefix("*.")))
            except InvalidParameter:
                try:
                    hosts.append(str(IPv6Address(domain)))
                except ValueError:
                    raise ConfigError(
                        f"--allowed-media-domains {domain}: expected a domain such as images.example or "
                        "*.images.example"
                    ) from None
        for network in networks:
            try:
                ranges.append(ip_network(network))
            except ValueError as error:
                raise ConfigError(f"--allowed-media-networks: {error}; expected one such as 10.1.0.0/16") from None
        return cls(frozenset(hosts), tuple(f".{suffix}" for suffix in suffixes), tuple(ranges))

    def check_host(self, target: FetchTarget) -> None:
        """Raises `InvalidParameter` if a host is not allowed, whatever its addresses are."""
        if (address := target.address) is not None and self._is_named(address):
            return
        if not (self.domains or self.suffixes) or target.host in self.domains or target.host.endswith(self.suffixes):
            return
        raise InvalidParameter(f"{target.host} is not one of the hosts that --allowed-media-domains allows")

    def allows(self, target: FetchTarget, address: Address) -> bool:
        """Whether an address of the target's host may be contacted."""
        return target.host in self.domains or self._is_named(address) or is_public(address)

    def _is_named(self, address: Address) -> bool:
        mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
        return any((mapped or address) in network for network in self.networks)
