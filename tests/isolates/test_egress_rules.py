"""The rules alone: what entries mean, and which addresses are not of the public internet."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.config import EgressConfig
from edge.errors import ConfigError
from edge.isolates.egress_rules import Denied, Rules, special_kind


def is_permitted(allow: list[str], host: str, port: int, address: str, deny: list[str] | None = None) -> bool:
    try:
        return bool(Rules(EgressConfig(allow=allow, deny=deny or [])).permitted(host, port, [ip_address(address)]))
    except Denied:
        return False


@pytest.mark.parametrize(
    ("entry", "host", "port", "address", "expected"),
    [
        ("*", "a.example", 443, "93.184.215.14", True),
        ("*", "a.example", 443, "10.0.0.1", False),
        ("*.example", "a.example", 443, "93.184.215.14", True),
        ("*.example", "a.example", 443, "10.0.0.1", False),
        ("*.example", "example", 443, "93.184.215.14", False),
        ("*.example", "a.example.evil", 443, "93.184.215.14", False),
        ("A.Example", "a.example", 443, "10.0.0.1", True),
        ("a.example", "aXexample", 443, "93.184.215.14", False),
        ("a.example:8080", "a.example", 443, "93.184.215.14", False),
        ("a.example:8080", "a.example", 8080, "10.0.0.1", True),
        ("*:443", "a.example", 443, "93.184.215.14", True),
        ("*:443", "a.example", 80, "93.184.215.14", False),
        ("10.1.0.0/16", "a.example", 80, "10.1.2.3", True),
        ("10.1.0.0/16", "a.example", 80, "10.2.2.3", False),
        ("10.1.0.0/16:80", "a.example", 81, "10.1.2.3", False),
        ("10.1.2.3", "10.1.2.3", 80, "10.1.2.3", True),
        ("127.0.0.1", "a.example", 80, "::ffff:127.0.0.1", True),
        ("[::1]:8080", "::1", 8080, "::1", True),
        ("[::1]:8080", "::1", 8081, "::1", False),
        ("::1", "localhost", 80, "::1", True),
        ("[fd00::/8]", "a.example", 80, "fd12::1", True),
        ("bücher.example", "xn--bcher-kva.example", 80, "10.0.0.1", True),
    ],
)
def test_what_an_entry_permits(entry, host, port, address, expected):
    assert is_permitted([entry], host, port, address) is expected


def test_deny_goes_first():
    assert not is_permitted(["a.example"], "a.example", 80, "10.0.0.1", deny=["10.0.0.0/8"])
    assert not is_permitted(["*"], "a.example", 80, "93.184.215.14", deny=["*.example"])
    assert not is_permitted(["10.0.0.0/8"], "a.example", 80, "::ffff:10.0.0.1", deny=["10.0.0.1"])
    assert is_permitted(["*"], "a.example", 80, "93.184.215.14", deny=["a.example:22"])


@pytest.mark.parametrize(
    "entry", ["", "http://a.example", "a b", "a:0", "a:99999", "a:b", "[::1", "10.0.0.0/99", "a/b"]
)
def test_entries_that_mean_nothing(entry):
    with pytest.raises(ConfigError, match="expected a host name"):
        Rules(EgressConfig(deny=[entry]))


def test_an_error_names_the_setting_as_it_should_be():
    with pytest.raises(Denied, match=r'allow = \["a.example", "\[::1\]:80"\]'):
        Rules(EgressConfig(allow=["a.example"])).check_name("::1", 80)


@pytest.mark.parametrize("address", ["1.1.1.1", "172.15.0.1", "2606:4700::1111", "::ffff:1.1.1.1", "2002:101:101::1"])
def test_public_addresses(address):
    assert special_kind(ip_address(address)) is None


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_is_the_same_in_every_disguise(address: IPv4Address):
    value = int(address)
    kind = special_kind(address)
    assert special_kind(IPv6Address(0xFFFF << 32 | value)) == kind
    assert special_kind(IPv6Address(0x64FF9B << 96 | value)) == kind
    assert special_kind(IPv6Address(0x2002 << 112 | value << 80 | 1)) == kind
    if not address.is_global or address.is_multicast:
        assert kind is not None


@given(st.ip_addresses(v=6))
def test_ipv6_addresses_that_python_knows_to_be_special(address: IPv6Address):
    if not address.is_global and address.ipv4_mapped is None and address.sixtofour is None:
        assert special_kind(address) is not None
