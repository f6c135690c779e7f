"""What a fetcher may contact: every notation of an address, and URLs that parsers read in different ways."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from quire.engine.protocol.errors import ConfigError, InvalidParameter
from quire.server.media.addresses import MAX_URL_CHARACTERS, AddressRules, FetchTarget, is_public, parse_url

INVALID = {
    "decimal": "http://2130706433/",
    "decimal beyond 32 bits": "http://4294967296/",
    "octal": "http://0177.0.0.1/",
    "leading zeros": "http://127.000.000.001/",
    "hexadecimal": "http://0x7f000001/",
    "hexadecimal parts": "http://0x7f.0.0.1/",
    "only a prefix": "http://0x/",
    "short": "http://127.1/",
    "zero": "http://0/",
    "five parts": "http://127.0.0.1.1/",
    "part beyond 255": "http://256.0.0.1/",
    "fullwidth decimal": "http://２１３０７０６４３３/",
    "zone": "http://[fe80::1%eth0]/",
    "zone, quoted": "http://[fe80::1%25eth0]/",
    "zone of loopback": "http://[::1%lo]/",
    "IPvFuture": "http://[v1.a]/",
    "no brackets": "http://::1/",
    "user name": "http://example.com@127.0.0.1/",
    "user name and password": "http://user:password@example.com/",
    "two user names": "http://a@b@127.0.0.1/",
    "backslash": "http://example.com\\@127.0.0.1/",
    "line break": "http://example.com/\r\nHost: internal",
    "tab in the scheme": "ht\ttp://127.0.0.1/",
    "space before": " http://127.0.0.1/",
    "NUL": "http://127.0.0.1\0.example.com/",
    "half of a character": "http://example.com/?\udca0",
    "quoted host": "http://127%2e0%2e0%2e1/",
    "empty host": "http:///etc/passwd",
    "no host": "http:127.0.0.1",
    "one slash": "http:/127.0.0.1/",
    "empty label": "http://a..b/",
    "label too long": f"http://{'a' * 64}.com/",
    "host too long": f"http://{'a.' * 200}com/",
    "host that is slow to read": f"http://{'ü' * 4000}.com/",
    "dashes": "http://-rf/",
    "ligature of a slash": "http://example.com⁄@127.0.0.1/",
    "port 0": "http://example.com:0/",
    "SSH's port": "http://example.com:22/",
    "mail's port": "http://example.com:25/",
    "port beyond 16 bits": "http://example.com:65536/",
    "port in other digits": "http://example.com:٨٠/",
    "negative port": "http://example.com:-1/",
    "FTP": "ftp://example.com/",
    "gopher": "gopher://127.0.0.1:6379/_FLUSHALL",
    "file": "file:///etc/passwd",
    "dict": "dict://127.0.0.1:11211/stat",
    "unix": "http+unix://%2Fvar%2Frun%2Fdocker.sock/",
    "javascript": "javascript:alert(1)",
    "too long": "http://example.com/" + "a" * MAX_URL_CHARACTERS,
    "empty": "",
}
REFUSED = {
    "loopback": "127.0.0.1",
    "end of loopback": "127.255.255.254",
    "unspecified": "0.0.0.0",
    "this network": "0.1.2.3",
    "private, 10": "10.0.0.1",
    "private, 172.16": "172.31.255.255",
    "private, 192.168": "192.168.1.1",
    "link-local": "169.254.1.1",
    "metadata of AWS, GCP, Azure": "169.254.169.254",
    "credentials of ECS": "169.254.170.2",
    "metadata of Alibaba": "100.100.100.200",
    "metadata of Oracle": "192.0.0.192",
    "host of Azure": "168.63.129.16",
    "carrier-grade NAT": "100.64.0.1",
    "documentation": "192.0.2.1",
    "documentation 2": "198.51.100.1",
    "documentation 3": "203.0.113.1",
    "benchmarks": "198.19.255.255",
    "6to4 relay": "192.88.99.1",
    "multicast": "224.0.0.1",
    "reserved": "240.0.0.1",
    "broadcast": "255.255.255.255",
    "IPv6 loopback": "::1",
    "IPv6 unspecified": "::",
    "IPv6 link-local": "fe80::1",
    "IPv6 link-local with a zone": "fe80::1%eth0",
    "IPv6 site-local": "fec0::1",
    "IPv6 unique local": "fd12:3456::1",
    "metadata of AWS by IPv6": "fd00:ec2::254",
    "metadata of GCP by IPv6": "fd20:ce::254",
    "IPv6 multicast": "ff02::1",
    "IPv6 documentation": "2001:db8::1",
    "IPv6 documentation 2": "3fff::1",
    "IPv6 discard": "100::1",
    "segment routing": "5f00::1",
    "not assigned": "4000::1",
    "mapped loopback": "::ffff:127.0.0.1",
    "mapped metadata": "::ffff:a9fe:a9fe",
    "compatible loopback": "::127.0.0.1",
    "compatible public": "::8.8.8.8",
    "translated loopback": "::ffff:0:127.0.0.1",
    "NAT64 loopback": "64:ff9b::127.0.0.1",
    "NAT64 metadata": "64:ff9b::a9fe:a9fe",
    "local NAT64": "64:ff9b:1::8.8.8.8",
    "6to4 loopback": "2002:7f00:1::1",
    "6to4 public": "2002:808:808::1",
    "Teredo": "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "ORCHID": "2001:20::1",
    "ISATAP loopback": "2a00::5efe:7f00:1",
    "ISATAP private": "2a00::200:5efe:a00:1",
}
PUBLIC = ("8.8.8.8", "172.15.0.1", "172.32.0.1", "100.128.0.1", "2606:4700::1", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8")


@pytest.mark.parametrize("url", INVALID.values(), ids=INVALID)
def test_a_url_without_one_plain_meaning_is_refused(url: str) -> None:
    with pytest.raises(InvalidParameter, match="URL"):
        parse_url(url)


@pytest.mark.parametrize("address", REFUSED.values(), ids=REFUSED)
def test_an_address_that_is_not_public_is_refused(address: str) -> None:
    assert not is_public(ip_address(address))


def test_public_addresses_are_allowed() -> None:
    assert all(is_public(ip_address(address)) for address in PUBLIC)


@pytest.mark.parametrize(
    ("url", "target", "again"),
    [
        ("HTTPS://Example.COM", FetchTarget("https", "example.com", 443, "/"), "https://example.com/"),
        ("http://example.com.:8080/a?q=1#f", FetchTarget("http", "example.com", 8080, "/a?q=1"), None),
        (
            "https://bücher.example/ü?ü=%20",
            FetchTarget("https", "xn--bcher-kva.example", 443, "/%C3%BC?%C3%BC=%20"),
            None,
        ),
        ("http://[0:0::0:1]:80/", FetchTarget("http", "::1", 80, "/"), "http://[::1]/"),
        ("http://１２７。0.0.1/", FetchTarget("http", "127.0.0.1", 80, "/"), "http://127.0.0.1/"),
        ("http://a.b1:8000/", FetchTarget("http", "a.b1", 8000, "/"), "http://a.b1:8000/"),
        ("https://example.com/?a=http://b@c/", FetchTarget("https", "example.com", 443, "/?a=http://b@c/"), None),
    ],
)
def test_a_url_has_one_form(url: str, target: FetchTarget, again: str | None) -> None:
    assert parse_url(url) == target
    assert parse_url(target.url) == target
    assert again in (None, target.url)
    assert (target.address is None) == any(each.isalpha() for each in target.host)


LOOPBACK, PRIVATE, ANY = ip_address("127.0.0.1"), ip_address("10.1.2.3"), ip_address("8.8.8.8")


def test_an_operator_names_hosts_and_networks() -> None:
    rules = AddressRules.parse(["Images.Example.com", "*.cdn.example", "10.0.0.7", "::1"], ["10.1.0.0/16"])
    named, below = parse_url("https://images.example.com/"), parse_url("https://a.b.cdn.example/")
    for allowed in (
        named,
        below,
        parse_url("http://10.0.0.7/"),
        parse_url("http://[::1]/"),
        parse_url("http://10.1.0.1"),
    ):
        rules.check_host(allowed)
    for refused in ("https://example.com/", "https://cdn.example/", "https://xcdn.example/", "http://8.8.8.8/"):
        with pytest.raises(InvalidParameter, match="--allowed-media-domains"):
            rules.check_host(parse_url(refused))
    assert rules.allows(named, LOOPBACK)
    assert not rules.allows(below, LOOPBACK)
    assert rules.allows(below, PRIVATE)
    assert rules.allows(below, ip_address("::ffff:10.1.2.3"))
    assert rules.allows(below, ANY)


def test_without_domains_every_host_is_allowed() -> None:
    for rules in (AddressRules.parse(), AddressRules.parse((), ["10.0.0.0/8"])):
        rules.check_host(target := parse_url("http://example.com/"))
        assert rules.allows(target, ANY)
        assert rules.allows(target, PRIVATE) == bool(rules.networks)
        assert not rules.allows(target, LOOPBACK)


@pytest.mark.parametrize("domain", ["https://example.com", "*", "a.*.com", "example.com:80", "127.1", ""])
def test_a_domain_of_the_options_must_be_one(domain: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-media-domains"):
        AddressRules.parse([domain])


def test_a_network_of_the_options_must_be_one() -> None:
    with pytest.raises(ConfigError, match=r"--allowed-media-networks: 10\.0\.0\.1/8 has host bits set"):
        AddressRules.parse((), ["10.0.0.1/8"])
