"""`lockstep launch nodes`: which hosts, what is printed, and what keeps hosts from running one job together.

The stand-in for ssh runs each command on this machine, in a folder of its own for each host.
"""

import shlex
import shutil
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

import pytest

import lockstep
from lockstep.cli import main
from lockstep.clusters import hosts, nodes
from lockstep.clusters.hosts import Event, Host, login_words, parse_hosts
from lockstep.clusters.logins import _JobWatch
from lockstep.clusters.tether_messages import Ended, HostFacts
from lockstep.errors import UserError

TASK = "import lockstep\n\n\nclass Nothing(lockstep.Task):\n    pass\n"


# ---- which hosts ----


def test_a_hostfile_is_read_as_mpi_reads_it(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# the rack\nhost1 slots=4 max-slots=8\n\nalice@host2:2  # hers\nhost3\n10.0.0.4\n")
    assert parse_hosts(None, str(file)) == [Host("host1", 4), Host("alice@host2", 2), Host("host3"), Host("10.0.0.4")]
    assert Host("alice@host2").name == "host2"


@pytest.mark.parametrize(
    ("asked", "text", "problem"),
    [
        ("a,b,a", None, "the host a is named twice"),
        ("a,bob@a", None, "the host a is named twice"),
        (" , ", None, "the list of hosts is empty"),
        ("-oProxyCommand=x", None, "'-oProxyCommand=x' is not a host"),
        (None, "host1 slots=many", "line 1: slots=many is not a number"),
        (None, "host1\nhost2 slots", "line 2, is not a host: host2 slots"),
        ("a", "b", "the hosts of the job are not clear"),
        (None, None, "the hosts of the job are not clear"),
    ],
)
def test_what_names_no_hosts_is_refused(tmp_path, asked, text, problem):
    if text is not None:
        (tmp_path / "hosts").write_text(text)
    with pytest.raises(UserError) as error:
        parse_hosts(asked, str(tmp_path / "hosts") if text else None)
    assert problem in str(error.value)


def test_this_machine_is_not_logged_in_to():
    for name in ("127.0.0.2", socket.gethostname()):
        assert login_words(Host(name), "ssh", "/job", "/bin/python")[0] == "/bin/python"

    words = login_words(Host("bob@192.0.2.1"), "ssh -p 2222", "/a job", "/bin/python")
    assert words[:3] == ["ssh", "-p", "2222"]
    assert "BatchMode=yes" in words
    assert words[-2] == "bob@192.0.2.1"
    assert words[-1].startswith("cd '/a job' && exec ")

    # ssh takes an address of IPv6 without brackets.
    assert login_words(Host("bob@[2001:db8::1]"), "ssh", "/job", "/bin/python")[-2] == "bob@2001:db8::1"


def test_an_address_of_an_interface_is_this_machine(monkeypatch):
    """Whether a socket can be bound to it does not say that, with ip_nonlocal_bind=1."""
    monkeypatch.setattr(hosts, "addresses_of_interfaces", lambda: {"eth0": ["192.0.2.9"]})
    assert Host("192.0.2.9").is_here()
    assert not Host("192.0.2.8").is_here()


def test_the_command_of_each_host_is_printed(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a slots=4\nb slots=2\n")
    words = ["launch", "nodes", "char_lm", "run_dir=runs/x", "--hostfile", "hosts", "--env", "NCCL_DEBUG=INFO"]
    assert main([*words, "--python", "/opt/python"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "# on a:"
    folder, command = lines[1].split(" && ")
    assert folder == f"cd {tmp_path}"
    assert shlex.split(command)[:5] == ["NCCL_DEBUG=INFO", "/opt/python", "-m", "lockstep", "train"]
    assert "--nproc 4 --nnodes 2 " in command
    assert "--join a:29400,b:29400" in command
    assert "--nproc 2 --nnodes 2 " in lines[3]


def test_values_of_variables_are_written_where_only_this_user_reads_them(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKEN", "hush")
    words = ["launch", "nodes", "char_lm", "--hosts", "a,b", "--env", "TOKEN", "--env", "OTHER=it's", "--out", "out"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "commands.txt").touch(mode=0o644)
    assert main(words) == 0
    text = (tmp_path / "out" / "commands.txt").read_text()
    assert "hush" not in text
    assert """ && TOKEN="$TOKEN" OTHER='it'"'"'s' lockstep train""" in text
    assert (tmp_path / "out" / "commands.txt").stat().st_mode & 0o777 == 0o600


def test_the_command_that_resumes_has_no_values_of_variables(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = []
    monkeypatch.setattr(nodes, "_run", lambda request, hosts, options, command: commands.append(command) or 0)
    secret = ["--env", "TOKEN=hush", "--env=OTHER=hush", "--en", "THIRD=hush", "run_dir=x"]
    assert main(["train", "char_lm", "--nodes", "a,b", *secret]) == 0
    assert main(["launch", "nodes", "char_lm", "--hosts", "a,b", "--submit", *secret]) == 0
    for command in commands:
        assert "--env TOKEN --env=OTHER --en THIRD run_dir=x" in command
    assert not (tmp_path / "x").exists()  # no file with the values either


def test_a_setting_says_where_to_resume(tmp_path, monkeypatch, capsys):
    """It was overridden: the job began at step 0."""
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(nodes, "_run", lambda request, *rest: asked.append(request) or 0)
    (tmp_path / "resume.yaml").write_text("resume: auto\n")
    for words in (["resume=auto"], ["--config", "resume.yaml"]):
        assert main(["train", "char_lm", "run_dir=x", "--nodes", "a,b", *words]) == 0
        assert main(["train", "char_lm", "--nodes", "a,b", *words]) == 2
        assert "resume=auto needs run_dir" in capsys.readouterr().err
    assert main(["train", "char_lm", "run_dir=x", "--nodes", "a,b", "--resume", "never"]) == 0
    assert [request.resume for request in asked] == [None, None, "never"]


def test_launch_nodes_resumes_as_it_was_typed(tmp_path, monkeypatch):
    """It resumed with auto, whatever the settings said."""
    monkeypatch.chdir(tmp_path)
    calls = []
    monkeypatch.setattr(nodes, "_run", lambda request, hosts, options, command: calls.append((request, command)) or 0)
    launch = ["launch", "nodes", "char_lm", "--hosts", "a,b", "--submit"]
    for words in ([], ["resume=never", "run_dir=x"], ["resume=runs/old"]):
        assert main([*launch, *words]) == 0
    assert [request.resume for request, _ in calls] == ["auto", "never", "runs/old"]

    # The command that resumes continues in the same folder.
    first, never, old = (command for _, command in calls)
    assert first.startswith("lockstep launch nodes char_lm --hosts a,b --submit run_dir=runs/char_lm-")
    assert never == "lockstep launch nodes char_lm --hosts a,b --submit run_dir=x resume=auto"
    assert "runs/old" not in old
    assert old.endswith(" resume=auto")


def test_the_run_folder_in_the_command_that_resumes_is_not_an_argument_of_the_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("import lockstep\n\nwith lockstep.start() as run:\n    pass\n")
    commands = []
    monkeypatch.setattr(nodes, "_run", lambda request, hosts, options, command: commands.append(command) or 0)
    assert main(["launch", "nodes", "own.py", "--hosts", "a,b", "--submit", "--", "run_dir=y", "--width", "16"]) == 0
    own, _, script = commands[0].partition(" -- ")
    assert " run_dir=runs/own-" in own
    assert script == "run_dir=y --width 16"


@pytest.mark.parametrize("words", [["--ssh", "ssh"], ["--python", "/p"], ["--port", "1"], ["--env", "A=1"]])
def test_options_for_hosts_need_hosts(words, capsys):
    assert main(["train", "char_lm", "steps=nonsense", *words]) == 2
    said = capsys.readouterr().err
    assert f"{words[0]} without hosts to log in to" in said
    assert "add --nodes host1,host2" in said


# ---- where they meet ----


def facts(name: str, addresses: list[str], resolved: dict[str, list[str]], reached_at: str = "") -> HostFacts:
    return HostFacts(name, {}, ["127.0.0.1", *addresses], resolved, reached_at)


def test_a_host_is_where_the_others_find_it():
    hosts = [Host("one"), Host("two")]

    # As Debian has it: a host's own name means 127.0.1.1 to itself.
    first = facts("one", ["192.168.0.9", "10.0.0.1"], {"one": ["127.0.1.1"], "two": ["10.0.0.2"]})
    second = facts("two", ["10.0.0.2"], {"one": ["10.0.0.1"], "two": ["127.0.1.1"]})
    assert [nodes._address_of(place, hosts, [first, second]) for place in (0, 1)] == ["10.0.0.1", "10.0.0.2"]

    # Names that only ssh knows.
    first = facts("one", ["192.168.0.9", "10.0.0.1"], {}, reached_at="10.0.0.1")
    assert nodes._address_of(0, hosts, [first, facts("two", ["10.0.0.2"], {})]) == "10.0.0.1"

    # Neither the bridge for containers, which both have, nor a link-local address leads to one of them.
    first = facts("one", ["172.17.0.1", "fe80::1", "10.0.0.1"], {"one": ["fe80::1"]})
    assert nodes._address_of(0, hosts, [first, facts("two", ["172.17.0.1", "10.0.0.2"], {})]) == "10.0.0.1"

    with pytest.raises(UserError, match="the other hosts cannot know where one is"):
        nodes._address_of(0, hosts, [facts("one", [], {}), second])


# ---- what keeps them from running one job ----


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """--ssh: `beta` has the folder tmp/beta and what `tmp/beta-path` has in front of its Python path."""
    here, beta = tmp_path / "alpha", tmp_path / "beta"
    for folder in (here, beta):
        folder.mkdir()
        (folder / "task.py").write_text(TASK)
        (folder / "job.yaml").write_text("steps: 3\n")
    script = tmp_path / "login"
    script.write_text(
        f"""#!/bin/sh
case $1 in
alpha) exec sh -c "$2" ;;
beta) PYTHONPATH={tmp_path}/beta-path:$PYTHONPATH
  command=$(echo "$2" | sed 's|{here}|{beta}|; s|PYTHONPATH=|PYTHONPATH={tmp_path}/beta-path:|')
  exec sh -c "$command" ;;
*) echo "ssh: Could not resolve hostname $1: Name or service not known" >&2; exit 255 ;;
esac
"""
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", str(Path(lockstep.__file__).parents[1]))
    return str(script)


def change_task(folder: Path) -> None:
    (folder / "beta" / "task.py").write_text(TASK + "# an older copy\n")


def remove_config(folder: Path) -> None:
    (folder / "beta" / "job.yaml").unlink()


def change_package(folder: Path) -> None:
    package = Path(lockstep.__file__).parent
    copy = shutil.copytree(package, folder / "beta-path" / "lockstep", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "_version.py").write_text('__version__ = "0.0.7"\n')


def change_torch(folder: Path) -> None:
    record = folder / "beta-path" / "torch-1.0.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")


WRONG = {
    "a host that nobody knows": (None, ["--nodes", "alpha,gamma"], ["gamma cannot be logged in to", "not resolve"]),
    "no such Python": (None, ["--python", "/nowhere/python"], [" cannot be logged in to", "/nowhere/python"]),
    "another target": (change_task, [], ["beta would run another program than alpha", "task.py: sources "]),
    "no config": (remove_config, ["--config", "job.yaml"], ["beta does not have job.yaml"]),
    "another Lockstep": (change_package, [], ["beta would run another program", "lockstep: 0.1.0", "0.0.7 (sources"]),
    "another torch": (change_torch, [], ["beta would run another program than alpha", "torch: ", "1.0 there"]),
    "a variable without a value": (None, ["--env", "NOBODY_SETS_THIS"], ["--env NOBODY_SETS_THIS has no value here"]),
    "two ways": (None, ["--join", "alpha:1"], ["--nodes and --join are two ways to start a job"]),
    "no ssh": (None, ["--ssh", "/nowhere/ssh"], ["/nowhere/ssh cannot be started, to log in to alpha"]),
    "an empty ssh": (None, ["--ssh", ""], ["--ssh '' is not a command", "leave it out"]),
    "half a quote": (None, ["--ssh", "ssh 'x"], ["is not a command", "No closing quotation"]),
    "no name": (None, ["--env", "a b=1"], ["--env 'a b' is not the name of a variable"]),
    "too many nodes": (None, ["--nnodes", "3"], ["--nnodes 3 needs 3 hosts"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_hosts_that_cannot_run_one_job_are_named(ssh, tmp_path, capfd, case):
    prepare, words, expected = WRONG[case]
    if prepare is not None:
        prepare(tmp_path)
    hosts = [] if "--nodes" in words else ["--nodes", "alpha,beta"]
    run = f"run_dir={tmp_path / 'run'}"
    assert main(["train", "task.py:Nothing", run, *hosts, "--nproc", "1", "--ssh", ssh, *words]) == 2
    said = capfd.readouterr().err
    assert [text for text in expected if text not in said] == [], said
    assert "do:    " in said
    assert not (tmp_path / "run").exists()  # nothing has started


def test_a_refused_start_leaves_no_folder(ssh, tmp_path, capfd):
    assert main(["train", "task.py:Nothing", "--nodes", "alpha,gamma", "--nproc", "1", "--ssh", ssh]) == 2
    assert "gamma cannot be logged in to" in capfd.readouterr().err
    assert list((tmp_path / "alpha").glob("runs/*")) == []


def test_a_port_that_is_taken_is_named(ssh, tmp_path, capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ["train", "task.py:Nothing", f"run_dir={tmp_path / 'run'}", "--nodes", "alpha,beta", "--ssh", ssh]
        assert main([*words, "--nproc", "1", "--port", port]) == 2
    said = capfd.readouterr().err
    assert f"alpha cannot listen at 127.0.0.1 port {port}" in said
    assert "Address already in use" in said
    assert "leave --port out" in said
    assert not (tmp_path / "run").exists()


def test_a_wrong_interface_ends_the_job_on_all_hosts(ssh, tmp_path, capfd):
    words = ["train", "task.py:Nothing", f"run_dir={tmp_path / 'run'}", "--nodes", "alpha,beta", "--ssh", ssh]
    assert main([*words, "--nproc", "1", "--env", "GLOO_SOCKET_IFNAME=eth99"]) == 2
    said = capfd.readouterr().err
    assert "lockstep: GLOO_SOCKET_IFNAME=eth99 names no network interface of " in said
    assert "[beta] lockstep: GLOO_SOCKET_IFNAME=eth99 names no network interface of " in said


def test_a_hostfile_limits_processes(ssh, tmp_path, capfd):
    Path("hosts").write_text("alpha slots=4\nbeta slots=1\n")
    assert main(["train", "task.py:Nothing", "--hostfile", "hosts", "--nproc", "2", "--ssh", ssh]) == 2
    assert "--nproc 2 is more than beta has slots" in capfd.readouterr().err


@pytest.mark.slow
def test_a_run_folder_that_is_not_shared_is_named(ssh, tmp_path, capfd):
    words = ["train", "task.py:Nothing", "run_dir=runs/a", "--nodes", "alpha,beta", "--ssh", ssh]
    assert main([*words, "--nproc", "1"]) == 2
    said = capfd.readouterr().err
    assert "beta cannot join alpha" in said
    assert "it does not see runs/a/.shared-" in said
    assert "set run_dir to a folder that all hosts share" in said


def test_lines_that_an_answer_overtakes_are_printed(capfd):
    """Answers and errors come through two pipes. The end of a login is its last event."""

    @dataclass
    class Job:
        name: str = "job"

    class Scripted:
        hosts = [Host("alpha"), Host("beta")]
        events = [
            Event(0, 1, answer=Ended(2)),
            Event(1, 1, answer=Ended(2)),
            Event(0, 1, "the reason", True),
            Event(0, 1, code=2),
            Event(1, 1, "its reason", True),
            Event(1, 1, code=2),
        ]

        def send(self, place, request):
            pass

        def next_event(self, wait):
            return self.events.pop(0)

    assert _JobWatch(Scripted(), [Job(), Job()], 2, []).run() == 2
    assert capfd.readouterr().err == "the reason\n[beta] its reason\n"
