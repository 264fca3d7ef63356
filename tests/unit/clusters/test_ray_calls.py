"""What `lockstep launch ray` asks of Ray, with a fake of nothing but Ray's own calls."""

from __future__ import annotations

import socket

import fake_ray
import pytest

from lockstep.cli import main
from lockstep.clusters.ray.actor import ActorReport, NodeActor
from lockstep.clusters.ray.cluster import ActorHandle, ActorLost, RayCluster, RayUnavailable
from lockstep.errors import UserError


@pytest.fixture
def ray(monkeypatch) -> fake_ray.FakeRay:
    return fake_ray.install(monkeypatch)


@pytest.mark.long
def test_a_job_is_placed_trained_and_given_back(ray, monkeypatch, tmp_path, capfd):
    """Everything but Ray is real: the driver, the actor, its launcher and the rank."""
    asked = []
    original = ray.placement_group

    def placement_group(*arguments, **named):
        asked.append(original(*arguments, **named))
        return asked[-1]

    monkeypatch.setattr(ray, "placement_group", placement_group)
    words = ["char_lm", "preset=tiny", "steps=2", f"run_dir={tmp_path}/run", "--nproc", "1", "--nnodes", "1"]
    assert main(["launch", "ray", *words, "--submit"]) == 0, capfd.readouterr()

    assert [(group.bundle_specs, group.strategy, group.selector) for group in asked] == [
        ([{"CPU": 1.0}], "STRICT_SPREAD", None)
    ]
    (actor,) = ray.actors
    assert actor.options["max_restarts"] == 0
    assert "lifetime" not in actor.options  # it ends with the driver
    assert "runtime_env" not in actor.options  # the dashboard shows it, and the secret is not for everybody
    assert actor.dead
    assert ray.groups == []
    assert not ray.connected
    assert (tmp_path / "run" / "model.safetensors").exists()
    said = capfd.readouterr()
    assert "end      step 2" in said.out
    assert "lockstep: joined the Ray cluster at 10.0.0.1:6379\n" in said.err


def test_dead_nodes_do_not_count(ray):
    (node,) = RayCluster("auto").nodes()
    assert (node.id, node.host, node.free, node.drained_at) == ("n1", "127.0.0.1", {"CPU": 2.0}, None)


def test_what_becomes_of_a_question(ray, tmp_path):
    cluster = RayCluster("auto")
    group = cluster.reserve(1, {"CPU": 1.0})
    actor = cluster.make_actor(group, 0, {"CPU": 1.0}, ("s" * 32, {}, str(tmp_path), str(tmp_path / "missing" / "x")))
    assert isinstance(actor, ActorHandle)
    assert isinstance(ray.actors[0]._made, NodeActor)

    # An answer that is not there yet is waited for, and not asked for again.
    ray.next_answer = late = fake_ray.Ref("10.0.0.1:29400", ready=False)
    assert actor.address("127.0.0.1") is None
    assert actor.address("127.0.0.1") is None
    late.ready = True
    assert actor.address("127.0.0.1") == "10.0.0.1:29400"

    # What the user can fix ends like a launcher that refuses; a broken connection proves nothing; an actor may be gone.
    actor.start(["train", "char_lm"])
    refusal = actor.poll()
    assert isinstance(refusal, ActorReport)
    assert refusal.code == 2
    assert "is not shared with" in refusal.lines[0]
    ray.next_answer = fake_ray.Ref(error=fake_ray.ActorUnavailableError("for a moment"))
    assert actor.poll() is None
    actor.kill()
    with pytest.raises(ActorLost, match=r"^The actor died\.$"):
        actor.poll()


@pytest.mark.parametrize(
    ("call", "ask"),
    [
        ("nodes", lambda cluster, group: cluster.nodes()),
        ("available_resources_per_node", lambda cluster, group: cluster.nodes()),
        ("get_draining_nodes", lambda cluster, group: cluster.nodes()),
        ("placement_group", lambda cluster, group: cluster.reserve(1, {"CPU": 1.0})),
        ("placement_group_table", lambda cluster, group: cluster.placed(group)),
        ("remove_placement_group", lambda cluster, group: cluster.release(group)),
        ("remote", lambda cluster, group: cluster.make_actor(group, 0, {"CPU": 1.0}, ())),
    ],
)
def test_a_control_service_that_is_away_is_told_from_other_errors(ray, monkeypatch, call, ask):
    cluster = RayCluster("auto")
    group = cluster.reserve(1, {"CPU": 1.0})

    def away(*arguments, **named):
        raise RuntimeError("failed to connect to the GCS\nat 10.0.0.1")

    monkeypatch.setattr(ray, call, away)
    with pytest.raises(RayUnavailable, match=r"^failed to connect to the GCS$"):
        ask(cluster, group)


def test_a_cluster_that_does_not_answer_is_an_error_for_people(ray):
    ray.refuses = ConnectionError("Could not find any running Ray instance.\nMore.")
    with pytest.raises(UserError) as raised:
        RayCluster("auto")
    assert raised.value.found == "Could not find any running Ray instance."


@pytest.mark.parametrize("typed", [True, False])
def test_an_address_where_nothing_listens_is_named_at_once(ray, monkeypatch, typed):
    """Ray tried for many minutes, and said only what its libraries say."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        assert RayCluster(where).address == "10.0.0.1:6379"

    monkeypatch.setenv("RAY_ADDRESS", where)
    monkeypatch.setattr(ray, "init", lambda **options: pytest.fail("Ray was asked"))
    with pytest.raises(UserError, match="no Ray cluster answers at --address") as raised:
        RayCluster(where if typed else "auto")
    assert raised.value.found == f"{where}: Connection refused"


def test_rays_client_is_refused(ray):
    with pytest.raises(UserError, match="which does not place nodes"):
        RayCluster("ray://10.0.0.1:10001")
