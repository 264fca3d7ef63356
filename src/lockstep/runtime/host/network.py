"""The network interfaces and addresses of this machine, found without importing torch, which takes seconds."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from lockstep.errors import UserError

# Where torch's backends listen for other ranks. Gloo takes names, and needs every one of them; NCCL takes beginnings of
# names, or names after "=", and needs one; after "^" both are what NCCL must not use.
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"


def loopback_interface() -> str | None:
    """Return the name of the network interface that no other machine can reach, or None if there is none."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


def addresses_of_interfaces() -> dict[str, list[str]]:
    """Return the IP addresses of every network interface, without the zones of IPv6 addresses."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [entry.address.partition("%")[0] for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }


def address_towards(host: str) -> str | None:
    """Return this machine's address on the way to `host`, or None if there is no way. Nothing is sent."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return probe.getsockname()[0].partition("%")[0]
    except OSError:
        return None


def address_family(host: str) -> socket.AddressFamily:
    """Return the family of an address that is written out."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def join_host_port(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around an IPv6 address, as it is typed after --join."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def as_others_reach_it(host: str) -> str:
    """Return `host`, or this machine's address in its network if the name means a loopback address here.

    Debian gives a machine's own name the address 127.0.1.1, where no other machine can reach a coordinator.
    `localhost`, and an address that is written out, mean what they say.
    """
    if host == "localhost" or _is_address(host):
        return host

    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return host

    if not all(ipaddress.ip_address(address).is_loopback for address in found if _is_address(address)):
        return host

    # An address of a network that exists in documentation only: the way there is the way to all others.
    return address_towards("192.0.2.1") or host


def _is_address(text: object) -> bool:
    try:
        return bool(ipaddress.ip_address(str(text)))
    except ValueError:
        return False


def interface_towards(host: str) -> str | None:
    """Return the network interface that has this machine's address on the way to `host`, or None."""
    address = address_towards(host)
    interfaces = addresses_of_interfaces().items()
    if found := next((name for name, addresses in interfaces if address in addresses), None):
        return found

    # All of 127.0.0.0/8 is this machine, though the interface has one of these addresses only.
    return loopback_interface() if address and address.startswith("127.") else None


def nccl_file_names_interface(env: Mapping[str, str]) -> bool:
    """Return whether a file of settings names NCCL's interface. NCCL would take a variable instead."""
    of_user = Path(env.get("NCCL_CONF_FILE") or Path(env.get("HOME", "/")) / ".nccl.conf")
    for path in (of_user, Path("/etc/nccl.conf")):
        with suppress(OSError):
            if re.search(rf"^\s*{NCCL_INTERFACE}\s*=", path.read_text(errors="replace"), re.MULTILINE):
                return True

    return False


def check_interfaces(env: Mapping[str, str], towards: str | None = None) -> None:
    """Raise a UserError if the user has named an interface that the ranks cannot use to reach each other.

    `towards` is the host where the nodes of a job on several machines meet. Without this check torch would fail with
    other words, or wait for half an hour.
    """
    gloo = env.get(GLOO_INTERFACE)
    nccl = env.get(NCCL_INTERFACE)
    known = addresses_of_interfaces() if gloo or nccl else {}

    # Gloo uses every interface that the variable lists; NCCL picks one of those that match.
    if gloo:
        words = gloo.removesuffix(",").split(",")
        named = [name for name in words if name in known]
        has_address = all(known[name] for name in named)
        _check_interface(f"{GLOO_INTERFACE}={gloo}", known, named, len(words) - len(named), has_address)

        if towards and loopback_interface() in named:
            _check_reachable(GLOO_INTERFACE, gloo, towards)

    if nccl:
        named = _matching(nccl, known)
        has_address = any(known[name] for name in named)
        _check_interface(f"{NCCL_INTERFACE}={nccl}", known, named, 0, has_address)
        if towards and named == [loopback_interface()]:
            _check_reachable(NCCL_INTERFACE, nccl, towards)


def _check_interface(
    setting: str, known: Mapping[str, list[str]], named: list[str], unknown: int, has_address: bool
) -> None:
    """Raise a UserError if an interface that `setting` names does not exist or has no address."""
    here = socket.gethostname()
    other = "one of them"

    # The first of these explains those below it.
    if not named:
        problem = f"{setting} names no network interface of {here}"
    elif unknown:
        problem = f"{setting} names an interface that {here} does not have"
    elif not has_address:
        problem, other = f"{setting}: this interface of {here} has no address", "another one"
    else:
        return

    interfaces = f"the interfaces here are {', '.join(sorted(known))}"
    raise UserError(problem, interfaces, f"set {setting.partition('=')[0]} to {other}, or leave it out")


def _check_reachable(variable: str, asked: str, towards: str) -> None:
    """Raise a UserError if the loopback interface was chosen, and `towards` is on another machine."""
    # Ranks of other machines would look for this one on their own machine, and wait.
    way = interface_towards(towards)
    if way not in (loopback_interface(), None):
        raise UserError(
            f"{variable}={asked} is an interface that no other machine can reach",
            f"the way to {towards} is {way}",
            f"leave {variable} out: Lockstep sets it",
        )


def _matching(asked: str, known: Mapping[str, list[str]]) -> list[str]:
    """Return the interfaces that the value of the variable means, as NCCL reads it."""
    words = tuple(word for word in asked.lstrip("^=").split(",") if word)
    if asked.startswith(("=", "^=")):
        matches = [name for name in known if name in words]
    else:
        matches = [name for name in known if name.startswith(words)]

    # With ^ the value names the interfaces that must not be used.
    if asked.startswith("^"):
        return [name for name in known if name not in matches]

    return matches
