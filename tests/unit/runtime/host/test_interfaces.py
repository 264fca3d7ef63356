"""Network interfaces: which one leads to another machine, and which names are refused."""

import socket
from unittest.mock import MagicMock

import pytest

from lockstep.errors import UserError
from lockstep.launch import supervisor
from lockstep.launch.job import Bounds, Job
from lockstep.launch.ranks.rank_environment import rank_environment
from lockstep.launch.wire.messages import Rendezvous, Start
from lockstep.runtime.host import network
from lockstep.runtime.host.network import GLOO_INTERFACE, NCCL_INTERFACE, check_interfaces, interface_towards
from lockstep.runtime.rendezvous.handshake import Secret

KNOWN = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"], "docker0": ["172.17.0.1"], "eth1": []}


@pytest.fixture
def interfaces(monkeypatch):
    """A machine with these interfaces, whose way to everything else is eth0."""
    monkeypatch.setattr(network, "addresses_of_interfaces", lambda: KNOWN)
    monkeypatch.setattr(network, "address_towards", lambda host: host if host.startswith("127.") else "10.0.0.1")


def test_the_interface_towards_a_host_has_the_address_of_this_machine(interfaces):
    assert interface_towards("10.0.0.2") == "eth0"
    assert interface_towards("127.0.0.5") == network.loopback_interface()


def test_a_way_that_the_system_knows():
    assert interface_towards("127.0.0.1") in {name for _, name in socket.if_nameindex()}
    assert interface_towards("no-such-host.invalid") is None


@pytest.mark.parametrize("value", ["eth0", "eth0,docker0"])
def test_names_that_gloo_takes(interfaces, value):
    check_interfaces({GLOO_INTERFACE: value}, "10.0.0.2")


@pytest.mark.parametrize("value", ["eth", "=eth0", "^docker,lo", "^=docker0"])
def test_names_that_nccl_takes(interfaces, value):
    check_interfaces({NCCL_INTERFACE: value}, "10.0.0.2")


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        (GLOO_INTERFACE, "eth", "names no network interface of"),
        (GLOO_INTERFACE, "ib0", "names no network interface of"),
        (GLOO_INTERFACE, "^docker0", "names no network interface of"),
        (GLOO_INTERFACE, "=eth0", "names no network interface of"),
        (GLOO_INTERFACE, "eth0,ib0", "names an interface that .* does not have"),
        (GLOO_INTERFACE, "eth0,eth1", "has no address"),
        (GLOO_INTERFACE, "eth0,lo", "no other machine can reach"),
        (NCCL_INTERFACE, "ib", "names no network interface of"),
        (NCCL_INTERFACE, "=eth", "names no network interface of"),
        (GLOO_INTERFACE, "eth1", "has no address"),
        (GLOO_INTERFACE, "lo", "no other machine can reach"),
    ],
)
def test_interfaces_that_lead_nowhere_are_refused(interfaces, variable, value, problem):
    with pytest.raises(UserError, match=problem) as error:
        check_interfaces({variable: value}, "10.0.0.2")
    assert f"{variable}={value}" in error.value.problem


def test_the_loopback_interface_will_do_on_one_machine(interfaces):
    check_interfaces({GLOO_INTERFACE: "lo"})
    check_interfaces({GLOO_INTERFACE: "lo"}, "127.0.0.3")


def test_a_single_rank_needs_no_interface(tmp_path, monkeypatch):
    """A profile may name an interface that only some machines have."""
    monkeypatch.setenv(NCCL_INTERFACE, "ib99")
    for name in ("Agent", "Coordinator"):
        monkeypatch.setattr(supervisor, name, MagicMock())
    supervisor.supervise(Job({}, tmp_path, Bounds(1, 1)))
    with pytest.raises(UserError, match="names no network interface of"):
        supervisor.supervise(Job({}, tmp_path, Bounds(1, 2)))


def test_ranks_of_several_machines_listen_on_the_way_to_the_coordinator(interfaces, tmp_path):
    start = Start(
        attempt=0,
        first_rank=2,
        count=1,
        world_size=3,
        group_rank=1,
        rendezvous=Rendezvous("10.0.0.2", 1, 2, "s"),
    )
    secret = Secret(b"0" * 32, "a test")

    def environment(user: dict[str, str]) -> dict[str, str]:
        return rank_environment(start, tmp_path, tmp_path / "logs", user, secret)

    env = environment({})
    assert (env[GLOO_INTERFACE], env[NCCL_INTERFACE]) == ("eth0", "=eth0")
    own = environment({GLOO_INTERFACE: "docker0", NCCL_INTERFACE: "ib"})
    assert (own[GLOO_INTERFACE], own[NCCL_INTERFACE]) == ("docker0", "ib")

    # A variable would win over a site's file, and a comment in it names nothing.
    (tmp_path / ".nccl.conf").write_text("NCCL_DEBUG=INFO\n# NCCL_SOCKET_IFNAME=ib\n")
    assert NCCL_INTERFACE in environment({"HOME": str(tmp_path)})
    (tmp_path / "site.conf").write_text("NCCL_DEBUG=INFO\nNCCL_SOCKET_IFNAME=ib\n")
    site = environment({"NCCL_CONF_FILE": str(tmp_path / "site.conf")})
    assert NCCL_INTERFACE not in site
    assert site[GLOO_INTERFACE] == "eth0"


def test_a_name_that_means_loopback_here_is_reached_by_the_address_in_the_network(interfaces, monkeypatch):
    """Debian gives a machine's own name the address 127.0.1.1."""
    meanings = {"node1": "127.0.1.1", "node2": "10.0.0.2"}

    def getaddrinfo(host, *args, **kwargs):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (meanings[host], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert network.as_others_reach_it("node1") == "10.0.0.1"
    assert network.as_others_reach_it("node2") == "node2"
    assert network.as_others_reach_it("localhost") == "localhost"
    assert network.as_others_reach_it("127.0.0.1") == "127.0.0.1"
