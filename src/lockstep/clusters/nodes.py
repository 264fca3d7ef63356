"""Plain hosts: log in to each of them and start its launcher, or print what to type there.

It needs ssh without a password, the same folder and the same Python on every host, and a run folder that all of them
see. All of that is checked on all hosts before the first launcher starts, and what is missing is named by host.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lockstep.clusters.command import make_request
from lockstep.clusters.hosts import Host, parse_hosts
from lockstep.clusters.logins import Logins
from lockstep.clusters.request import JobRequest
from lockstep.clusters.tether_messages import (
    HostFacts,
    HostProblem,
    Listen,
    Listening,
    Look,
    StartTraining,
    Tried,
    TryOut,
)
from lockstep.errors import UserError
from lockstep.launch.job import Bounds, parse_nproc
from lockstep.runtime.host.network import join_host_port

# The written commands may hold secrets: values of --env.
PRIVATE = True

HELP = "hosts that you can log in to: start the job on all of them over ssh, or print the command for each"

# The command itself stays until the job has ended, and starts it once.
STARTS_AGAIN = False

# The port that printed commands name. With --submit the first host chooses one that is free.
PRINTED_PORT = 29400


def add_options(parser: argparse.ArgumentParser) -> None:
    # The number of machines is that of the hosts, unless a range is asked for.
    parser.set_defaults(nnodes=None)
    parser.add_argument("--hosts", "--nodes", metavar="HOST,...", help="names or addresses; the first coordinates")
    add_host_options(parser)


def add_host_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `lockstep train --nodes` has in common with `lockstep launch nodes`."""
    parser.add_argument("--hostfile", metavar="FILE", help="a file with a host on each line: host1 slots=4")
    parser.add_argument("--ssh", metavar="COMMAND", help='how to log in, as in "ssh -p 2222 -i key"')
    parser.add_argument("--python", metavar="PATH", help="Python on the hosts (default: the path of this one)")
    parser.add_argument("--port", type=_port, metavar="N", help="where the hosts meet (default: a free port)")
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="an environment variable for all hosts, such as NCCL_DEBUG=INFO; may be repeated",
    )


def _port(text: str) -> int:
    """Return a port, for argparse."""
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise argparse.ArgumentTypeError(f"{text} is not a port: use 1 to 65535, or leave it out")

    return int(text)


# ---- lockstep launch nodes, and lockstep train --nodes ----


def render(request: JobRequest, options: argparse.Namespace) -> dict[str, str]:
    """Return the command to type on each host."""
    hosts = parse_hosts(options.hosts, options.hostfile)
    request = _for_hosts(request, hosts, options.nnodes)
    if options.submit and options.out is None:
        return {}  # the hosts get their commands from this one

    join = ",".join(join_host_port(host.name, options.port or PRINTED_PORT) for host in hosts)
    program = (options.python, "-m", "lockstep") if options.python else ("lockstep",)
    variables = " ".join(_assignment(word) for word in options.env)
    folder = shlex.quote(os.getcwd())

    text = ""
    for host in hosts:
        words = replace(request, nproc=_nproc_of(host, request)).train_command("--join", join, program=program)
        text += f"# on {host.name}:\ncd {folder} && {f'{variables} ' if variables else ''}{shlex.join(words)}\n"

    return {"commands.txt": text}


def submit(request: JobRequest, options: argparse.Namespace, files: dict[str, Path]) -> int:
    """Start the job on all hosts and stay until it has ended. Return the job's exit code."""
    hosts = parse_hosts(options.hosts, options.hostfile)
    request = _for_hosts(request, hosts, options.nnodes)
    return _run(request, hosts, options, _resume_command(options.arguments, request))


def _resume_command(arguments: Sequence[str], request: JobRequest) -> str:
    """Return the command `lockstep launch nodes` that resumes its run, whatever was typed the first time."""
    # What follows -- belongs to the script.
    words = without_values(arguments)
    end = words.index("--") if "--" in words else len(words)
    words, script_words = words[:end], words[end:]

    if not any(word.startswith("run_dir=") for word in words):
        words.append(f"run_dir={request.run_dir}")
    if request.resume != "auto":
        words = [*(word for word in words if not word.startswith("resume=")), "resume=auto"]

    return shlex.join(["lockstep", *words, *script_words])


def train(options: argparse.Namespace, overrides: Sequence[str], resume_command: str) -> int:
    """Run `lockstep train TARGET --nodes host1,host2`. `resume_command` is for the run folder in `overrides`."""
    if options.join is not None:
        raise UserError(
            "--nodes and --join are two ways to start a job on several machines",
            f"--join {options.join}",
            "leave --join out: the hosts meet at an address of the first one",
        )

    options.nproc = options.nproc or "auto"
    hosts = parse_hosts(options.nodes, options.hostfile)
    # Settings, here or in a file, may say where to resume as well: the hosts read them.
    request = replace(make_request(options, overrides), resume=options.resume)
    return _run(_for_hosts(request, hosts, options.nnodes), hosts, options, resume_command)


def _for_hosts(request: JobRequest, hosts: Sequence[Host], asked: str | None) -> JobRequest:
    """Return the request with as many machines as there are hosts, or with the range that was asked for."""
    nodes = Bounds(len(hosts), len(hosts)) if asked is None else request.nnodes
    if nodes.most > len(hosts):
        raise UserError(
            f"--nnodes {asked} needs {nodes.most} hosts",
            f"{len(hosts)}: {', '.join(host.name for host in hosts)}",
            "name more hosts, or leave --nnodes out",
        )

    for host in hosts:
        _nproc_of(host, request)

    return replace(request, nnodes=nodes)


def _nproc_of(host: Host, request: JobRequest) -> str:
    """Return how many processes a host runs: --nproc, or its slots if --nproc is auto."""
    if host.slots is None:
        return request.nproc
    if request.nproc == "auto":
        return str(host.slots)

    if parse_nproc(request.nproc).most > host.slots:
        raise UserError(
            f"--nproc {request.nproc} is more than {host.name} has slots",
            f"slots={host.slots} in the hostfile",
            f"use --nproc {host.slots}, or --nproc auto for the slots of each host; or raise slots",
        )

    return request.nproc


def _environment(asked: Sequence[str]) -> dict[str, str]:
    """Return the variables of --env: NAME=VALUE, or NAME for its value here."""
    found = {}
    for word in asked:
        name, equals, value = _split_variable(word)
        if not equals and name not in os.environ:
            raise UserError(f"--env {name} has no value here", "", f"use --env {name}=VALUE, or set {name} first")

        found[name] = value if equals else os.environ[name]

    return found


def _assignment(word: str) -> str:
    """Return a variable of --env for a shell: one without a value has the value that it has where it is typed."""
    name, equals, value = _split_variable(word)
    return f"{name}={shlex.quote(value)}" if equals else f'{name}="${name}"'


def _split_variable(word: str) -> tuple[str, str, str]:
    name, equals, value = word.partition("=")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UserError(f"--env {name!r} is not the name of a variable", "", "use --env NAME=VALUE, or --env NAME")
    return name, equals, value


def without_values(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command without the values of --env, which may be secrets: NAME=VALUE becomes NAME."""
    words: list[str] = []
    for number, word in enumerate(arguments):
        if word == "--":  # the rest belongs to the script
            return [*words, *arguments[number:]]

        # argparse takes beginnings of options, too.
        option, equals, value = word.partition("=")
        if _is_env(option) and equals:
            words.append(f"{option}={value.partition('=')[0]}")
        else:
            words.append(word.partition("=")[0] if words and _is_env(words[-1]) else word)

    return words


def _is_env(word: str) -> bool:
    return word.startswith("--e") and "--env".startswith(word)


def refuse_host_options(options: argparse.Namespace) -> None:
    """Raise a UserError for options of `lockstep train` that mean nothing without hosts to log in to."""
    given = {"--ssh": options.ssh, "--python": options.python, "--port": options.port, "--env": options.env or None}
    if found := [option for option, value in given.items() if value is not None]:
        raise UserError(
            f"{' and '.join(found)} without hosts to log in to",
            "neither --nodes nor --hostfile",
            f"add --nodes host1,host2 or --hostfile FILE, or leave {' and '.join(found)} out",
        )


# ---- the start ----


def _run(request: JobRequest, hosts: list[Host], options: argparse.Namespace, resume_command: str) -> int:
    # `lockstep --help` must not wait for these.
    from lockstep.launch.terminal import ONE_LOG
    from lockstep.launch.wire.secret import SECRET, SECRET_FILE

    variables = _environment(options.env)
    ssh = "ssh" if options.ssh is None else options.ssh
    with Logins(hosts, ssh, os.getcwd(), options.python or sys.executable) as logins:
        facts = _look(logins, request)
        addresses = [_address_of(place, hosts, facts) for place in range(len(hosts))]
        port = _try_out(logins, request, addresses[0], options.port or 0)

        # The job's secret is in the run folder, in a file that only this user can read, unless the user has set it.
        given = {name: os.environ[name] for name in (SECRET, SECRET_FILE) if name in os.environ}
        job = StartTraining(
            target=request.target,
            overrides=[*request.overrides, f"run_dir={request.run_dir}"],
            config_files=list(request.config_files),
            arguments=list(request.script_arguments),
            nproc=request.nproc,
            nnodes=f"{request.nnodes.least}:{request.nnodes.most}",
            join=",".join(join_host_port(address, port) for address in addresses),
            resume=request.resume,
            resume_command=resume_command,
            env={ONE_LOG: "1", **given, **variables},
            run_dir=str(request.run_dir),
            place=0,
            least=request.nnodes.least,
        )
        jobs = [replace(job, nproc=_nproc_of(host, request), place=place) for place, host in enumerate(hosts)]
        return logins.train(jobs, request.nnodes.least)


def _look(logins: Logins, request: JobRequest) -> list[HostFacts]:
    """Ask all hosts what they have, and raise a UserError if they cannot run one job together."""
    target = request.target if request.target.endswith(".py") else request.target.rpartition(":")[0]
    files = [*request.config_files, *([target] if target else [])]
    names = [host.name for host in logins.hosts]
    answers = logins.ask(range(len(names)), Look(request.target, names, files), HostFacts)

    facts: list[HostFacts] = []
    for name, answer in zip(names, answers, strict=True):
        if isinstance(answer, HostProblem):
            raise UserError(
                f"{name} cannot read the files of the job",
                answer.problem,
                f"make {', '.join(files) or 'the installed packages'} readable there",
            )

        facts.append(answer)

    for name, here in zip(names, facts, strict=True):
        if here.missing:
            raise UserError(
                f"{name} does not have {', '.join(here.missing)}",
                f"looked for in {os.getcwd()}",
                "copy the files there, or start the job in a folder that all hosts share",
            )

    for name, here in zip(names[1:], facts[1:], strict=True):
        first = facts[0].program
        different = [key for key in first if here.program.get(key) != first[key]]
        if different:
            found = "; ".join(f"{key}: {first[key]} on {names[0]}, {here.program.get(key)} there" for key in different)
            raise UserError(
                f"{name} would run another program than {names[0]}",
                found,
                "install the same versions and copy the same files to every host; --python PATH names another Python",
            )

    return facts


def _address_of(place: int, hosts: Sequence[Host], facts: Sequence[HostFacts]) -> str:
    """Return the address at which the others reach a host; the host must have it.

    A host's own name often means 127.0.1.1 to the host itself, so what the others know comes first. A name that only
    the configuration of ssh knows means nothing to any of them: then the address at which the login arrived is taken.
    An address that several hosts have, such as that of a bridge for containers, does not tell them apart, and a
    link-local one means nothing without the name of an interface.
    """
    name, host = hosts[place].name, facts[place]
    others = [other for number, other in enumerate(facts) if number != place]
    known = [address for other in [*others, host] for address in other.resolved.get(name, [])]
    candidates = [*known, host.reached_at, *host.addresses]
    alone = len({fact.name for fact in facts}) == 1

    def fits(address: str) -> bool:
        is_loopback = address.startswith("127.") or address == "::1"
        if is_loopback or alone:
            return alone and (is_loopback or address in host.addresses)

        is_shared = any(address in other.addresses for other in others)
        is_link_local = address.startswith(("fe80:", "169.254."))
        return address in host.addresses and not is_shared and not is_link_local

    found = next((address for address in candidates if fits(address)), None)
    if found is None:
        raise UserError(
            f"the other hosts cannot know where {name} is",
            f"{name} means {', '.join(known) or 'nothing'} to them; its own addresses are {', '.join(host.addresses)}",
            f"use an address of {name} instead of its name",
        )

    return found


def _try_out(logins: Logins, request: JobRequest, address: str, port: int) -> int:
    """Have the first host choose a port, and the others try to reach it. Return the port."""
    first, *others = [host.name for host in logins.hosts]
    mark = str(request.run_dir / f".shared-{secrets.token_hex(4)}")
    (answer,) = logins.ask([0], Listen(address, port, mark), Listening)
    if isinstance(answer, HostProblem):
        raise UserError(
            f"{first} cannot listen at {address} port {port or 'of its choice'}, or write to {request.run_dir}",
            answer.problem,
            "leave --port out: a free port is chosen" if port else "use a run_dir that it can write to",
        )

    asked = TryOut(address, answer.port, mark)
    for name, tried in zip(others, logins.ask(range(1, len(logins.hosts)), asked, Tried), strict=True):
        if problem := tried.problem:
            network = f"open the network between {name} and {first}, for all ports: ranks use more than this one"
            shared = "set run_dir to a folder that all hosts share"
            raise UserError(f"{name} cannot join {first}", problem, shared if mark in problem else network)

    return answer.port
