"""Which hosts, ports and addresses handlers' requests may go to: `[egress]` of the configuration, parsed.

It knows nothing about HTTP and resolves no names. Whoever connects hands it the addresses that a name has, and
connects to one of those that it gives back: a name cannot mean one address here and another one a moment later.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import msgspec

from edge.config import EgressConfig
from edge.errors import ConfigError

Address = IPv4Address | IPv6Address

# From IANA's registries of special-purpose addresses (RFC 6890 and its successors).
_SPECIAL = tuple(
    (ipaddress.ip_network(network), kind)
    for network, kind in (
        ("0.0.0.0/8", "an unspecified"),
        ("10.0.0.0/8", "a private"),
        ("100.64.0.0/10", "a carrier-grade NAT"),
        ("127.0.0.0/8", "a loopback"),
        ("169.254.0.0/16", "a link-local"),
        ("172.16.0.0/12", "a private"),
        ("192.0.0.0/24", "a protocol"),
        ("192.0.2.0/24", "a documentation"),
        ("192.88.99.0/24", "a relay"),
        ("192.168.0.0/16", "a private"),
        ("198.18.0.0/15", "a benchmarking"),
        ("198.51.100.0/24", "a documentation"),
        ("203.0.113.0/24", "a documentation"),
        ("224.0.0.0/4", "a multicast"),
        ("240.0.0.0/4", "a reserved"),
        ("::/128", "an unspecified"),
        ("::1/128", "a loopback"),
        ("fc00::/7", "a private"),
        ("fe80::/10", "a link-local"),
        ("fec0::/10", "a site-local"),
        ("ff00::/8", "a multicast"),
        ("2001::/23", "a protocol"),
        ("2001:db8::/32", "a documentation"),
        ("3fff::/20", "a documentation"),
    )
)
_GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class Denied(Exception):
    """The rules do not let a request go there; the text says which rule, and how to permit it."""


class Rule(msgspec.Struct, frozen=True):
    """One entry of `allow` or `deny`: a name (maybe with `*`) or a network, and a port unless it is for all."""

    text: str
    name: re.Pattern[str] | None = None
    network: IPv4Network | IPv6Network | None = None
    port: int | None = None
    is_exact: bool = False
    """Whether it reaches private addresses: it is a network, an address, or a name without a wildcard."""

    def matches_name(self, host: str, port: int) -> bool:
        """Whether this is about the name `host`, whatever its addresses are."""
        return self.port in (None, port) and self.name is not None and self.name.fullmatch(host) is not None

    def may_match(self, host: str, port: int) -> bool:
        """Whether this is about `host` or could be about one of its addresses."""
        return self.port in (None, port) if self.network is not None else self.matches_name(host, port)

    def matches(self, host: str, port: int, address: Address) -> bool:
        """Whether this is about `address`, reached by the name `host`."""
        if self.network is None:
            return self.matches_name(host, port)
        return self.port in (None, port) and any(
            each.version == self.network.version and each in self.network for each in (address, embedded(address))
        )


class Rules:
    """`allow` and `deny` together.

    Raises:
        ConfigError: an entry is neither name, address nor network.
    """

    def __init__(self, config: EgressConfig) -> None:
        self._config = config
        self._allow = [_rule("allow", text) for text in config.allow]
        self._deny = [_rule("deny", text) for text in config.deny]

    def check_name(self, host: str, port: int) -> None:
        """What can be said before `host` is looked up: a name that no rule permits is not even asked for.

        Raises:
            Denied: no address of it could be permitted.
        """
        for rule in self._deny:
            if rule.matches_name(host, port):
                raise Denied(f"egress.deny has {json.dumps(rule.text)}")
        if not any(rule.may_match(host, port) for rule in self._allow):
            raise self._not_allowed(host, port)

    def permitted(self, host: str, port: int, addresses: Sequence[Address]) -> list[Address]:
        """Those of the `addresses` of `host` that a request may be sent to, in their order; at least one.

        Raises:
            Denied: there is none.
        """
        self.check_name(host, port)
        permitted, reasons = [], []
        for address in addresses:
            reason = self._why_not(host, port, address)
            if reason is None:
                permitted.append(address)
            else:
                reasons.append(reason)
        if not permitted:
            raise reasons[0] if reasons else Denied(f"{host} has no address")
        return permitted

    def _why_not(self, host: str, port: int, address: Address) -> Denied | None:
        for rule in self._deny:
            if rule.matches(host, port, address):
                return Denied(f"egress.deny has {json.dumps(rule.text)}")
        rules = [rule for rule in self._allow if rule.matches(host, port, address)]
        if not rules:
            return self._not_allowed(host, port)
        kind = special_kind(address)
        if kind is None or any(rule.is_exact for rule in rules):
            return None
        subject = f"{address} is" if host == str(address) else f"{host} is {address},"
        return Denied(
            f"{subject} {kind} address, and handlers reach those only where they are listed. To permit it, add to the "
            f"configuration: {self._with(host, port)}"
        )

    def _not_allowed(self, host: str, port: int) -> Denied:
        return Denied(
            f"no entry of egress.allow permits {_shown(host)}:{port}. To permit it, add to the configuration: "
            f"{self._with(host, port)}"
        )

    def _with(self, host: str, port: int) -> str:
        """The setting as it is now, with one entry more."""
        return f"[egress] allow = {json.dumps([*self._config.allow, f'{_shown(host)}:{port}'])}"


def special_kind(address: Address) -> str | None:
    """What kind of address this is if it is not one of the public internet, for example "a private"; else None.

    An address that carries an IPv4 address in it (mapped, 6to4, NAT64) is of that one's kind.
    """
    inner = embedded(address)
    for network, kind in _SPECIAL:
        if inner.version == network.version and inner in network:
            return kind
    if inner.version == 6 and inner not in _GLOBAL_V6:
        return "a reserved"
    return None


def embedded(address: Address) -> Address:
    """The IPv4 address that packets to `address` end at, or `address` itself."""
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


_HOST_AND_PORT = re.compile(r"(?P<host>\[[^\]]+\]|[^:\[\]]+|[0-9a-f:.]*:[0-9a-f:.]*:[0-9a-f:./]*)(:(?P<port>\d{1,5}))?")
_NAME = re.compile(r"[a-z0-9_*.-]{1,255}")


def _rule(key: str, text: str) -> Rule:
    match = _HOST_AND_PORT.fullmatch(text.strip().lower())
    port = int(match["port"]) if match and match["port"] else None
    host = match["host"].strip("[]") if match else ""
    if match and (port is None or 0 < port < 65536):
        try:
            return Rule(text, network=ipaddress.ip_network(host, strict=False), port=port, is_exact=True)
        except ValueError:
            name = _ascii(host).rstrip(".")
            if _NAME.fullmatch(name):
                pattern = re.compile(re.escape(name).replace(r"\*", ".*"))
                return Rule(text, name=pattern, port=port, is_exact="*" not in name)
    raise ConfigError(
        f"egress.{key} has {json.dumps(text)}; expected a host name (with * as a wildcard), an address or a network, "
        'each with :PORT if wanted, such as "*.example.com", "localhost:3000", "10.1.0.0/16" or "[::1]:8080"'
    )


def _ascii(host: str) -> str:
    try:
        return host if host.isascii() else host.encode("idna").decode()
    except UnicodeError:
        return ""


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
