"""The environment variables that the ranks of an attempt on one node share: who they are, and where they meet."""

from __future__ import annotations

import fcntl
from collections.abc import Mapping
from pathlib import Path

from lockstep.errors import UserError
from lockstep.launch.hangs import flight_recorder
from lockstep.launch.wire.messages import Rendezvous, Start
from lockstep.launch.wire.store_server import store_secret
from lockstep.runtime import attempt_folder
from lockstep.runtime.environments.launcher import ATTEMPT, ATTEMPT_FOLDER, STORE_FILE, STORE_KEY_FILE, STORE_PORT
from lockstep.runtime.host.network import (
    GLOO_INTERFACE,
    NCCL_INTERFACE,
    interface_towards,
    loopback_interface,
    nccl_file_names_interface,
)
from lockstep.runtime.rendezvous.handshake import Secret


def rank_environment(
    start: Start, folder: Path, logs: Path, user: Mapping[str, str], secret: Secret | None
) -> dict[str, str]:
    """Return the environment that all ranks of this node share.

    `folder` is that of the attempt, `logs` that of the run's logs, `user` the user's environment, `secret` the job's.
    """
    rendezvous = start.rendezvous
    if rendezvous.store_nonce:
        store = _store_server(rendezvous, folder, user, secret)
    else:
        store = _store_file(folder, user)

    # The user's own variables take precedence over the flight recorder's.
    return {
        **flight_recorder.environment(logs),
        **user,
        "WORLD_SIZE": str(start.world_size),
        "LOCAL_WORLD_SIZE": str(start.count),
        "GROUP_RANK": str(start.group_rank),
        "MASTER_ADDR": rendezvous.address,
        "MASTER_PORT": str(rendezvous.port),
        ATTEMPT_FOLDER: str(folder),
        ATTEMPT: str(start.attempt),
        **store,
    }


def _store_file(folder: Path, user: Mapping[str, str]) -> dict[str, str]:
    """Return where ranks of one node meet: in a file, in a folder that only this user can read."""
    check_locks(folder)

    # Gloo listens where no other machine can connect.
    loopback = loopback_interface()

    gloo = {GLOO_INTERFACE: loopback} if loopback and GLOO_INTERFACE not in user else {}
    return {STORE_FILE: str(attempt_folder.store(folder)), **gloo}


def check_locks(folder: Path) -> None:
    """Raise a UserError if files in the folder cannot be locked, as torch's FileStore does."""
    try:
        with attempt_folder.store(folder).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        raise UserError(
            f"the ranks cannot meet in {folder.parent}: files there cannot be written and locked",
            error.strerror or str(error),
            "set TMPDIR to a folder on a local disk",
        ) from None


def _store_server(
    rendezvous: Rendezvous, folder: Path, user: Mapping[str, str], secret: Secret | None
) -> dict[str, str]:
    """Return where ranks of several nodes meet: at the coordinator's server, for which they get a key."""
    # The key is in a file, not in a variable, because programs may record their environment.
    assert secret is not None
    key_file = attempt_folder.store_key(folder)
    key_file.touch(mode=0o600)
    key_file.write_bytes(store_secret(secret, rendezvous.store_nonce).key)

    store = {STORE_KEY_FILE: str(key_file), STORE_PORT: str(rendezvous.store_port)}
    return {**_interfaces(rendezvous.address, user), **store}


def _interfaces(coordinator: str, user: Mapping[str, str]) -> dict[str, str]:
    """Return the interfaces at which the ranks of this node listen for those of other nodes.

    Left alone, gloo takes the address that the machine's own name has, which is often 127.0.1.1, and NCCL the first
    interface that is up, which may be a bridge for containers. The interface towards the coordinator works. A file
    of settings for NCCL takes precedence: its author knows the machine.
    """
    interface = interface_towards(coordinator)

    # Settings of the user stay, whether they are in the environment or in a file of NCCL.
    chosen = {GLOO_INTERFACE: interface, NCCL_INTERFACE: f"={interface}"} if interface else {}
    given = {*user, *([NCCL_INTERFACE] if nccl_file_names_interface(user) else [])}

    return {name: value for name, value in chosen.items() if name not in given}
