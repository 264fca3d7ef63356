"""Plain hosts: the command to type on each of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep.clusters.request import Request
from lockstep.errors import UserError

HELP = "hosts that you can log in to: print the command for each of them"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", metavar="HOST,...", required=True, help="names or addresses; the first coordinates")
    parser.add_argument("--port", type=int, default=29400, help="port of the first host (default 29400)")


def render(request: Request, options: argparse.Namespace) -> dict[str, str]:
    hosts = [host.strip() for host in options.hosts.split(",") if host.strip()]
    join = ",".join(f"{host}:{options.port}" for host in hosts)
    command = request.shell_command("--join", join)
    return {"commands.txt": "".join(f"# on {host}:\n{command}\n" for host in hosts)}


def submit(request: Request, options: argparse.Namespace, files: dict[str, Path]) -> int:
    raise UserError(
        "lockstep launch nodes cannot log in to hosts yet", "--submit", f"type what {files['commands.txt']} says"
    )
