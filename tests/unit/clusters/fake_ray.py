"""Ray, as far as `lockstep.clusters.ray.cluster` calls it: actors are objects of this process."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class RayError(Exception):
    pass


class RayActorError(RayError):
    pass


class ActorUnavailableError(RayActorError):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: BaseException):
        super().__init__(str(cause))
        self.cause = cause


class Ref:
    """The result of a call, or what it raised. It is there at once unless a test says otherwise."""

    def __init__(self, value: Any = None, error: Exception | None = None, ready: bool = True):
        self.value, self.error, self.ready = value, error, ready


class Actor:
    """An object whose methods are called here and now."""

    def __init__(self, ray: FakeRay, made: Any, options: dict[str, Any]):
        self._ray, self._made, self.options, self.dead = ray, made, options, False

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self._call(name, arguments))

    def _call(self, name: str, arguments: tuple[Any, ...]) -> Ref:
        if self._ray.next_answer is not None:
            answer, self._ray.next_answer = self._ray.next_answer, None
            return answer
        if self.dead:
            return Ref(error=RayActorError("The actor died.\nIts node was removed."))
        try:
            return Ref(getattr(self._made, name)(*arguments))
        except Exception as error:
            return Ref(error=RayTaskError(error))


class FakeRay(ModuleType):
    """The module `ray`, with a cluster of one node that has two CPUs."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.actors: list[Actor] = []
        self.groups: list[SimpleNamespace] = []
        self.next_answer: Ref | None = None  # what the next call of an actor returns
        self.refuses: Exception | None = None  # what `init` raises
        self.connected = False
        self.resources = {"CPU": 2.0}
        self._private = SimpleNamespace(state=SimpleNamespace(state=self))

    def init(self, address: str, log_to_driver: bool, logging_level: int) -> Any:
        if self.refuses:
            raise self.refuses
        self.connected = True
        return SimpleNamespace(address_info={"gcs_address": "10.0.0.1:6379"})

    def shutdown(self) -> None:
        self.connected = False

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(runtime_env={})

    def nodes(self) -> list[dict[str, Any]]:
        shared = {"NodeManagerAddress": "127.0.0.1", "Resources": self.resources}
        return [{"NodeID": "n1", "Alive": True, **shared}, {"NodeID": "n0", "Alive": False, **shared}]

    def available_resources_per_node(self) -> dict[str, dict[str, float]]:
        return {"n1": self.resources}

    def get_draining_nodes(self) -> dict[str, int]:
        return {}

    def placement_group(self, bundles: list[dict[str, float]], strategy: str, bundle_label_selector: Any) -> Any:
        self.groups.append(SimpleNamespace(bundle_specs=bundles, strategy=strategy, selector=bundle_label_selector))
        return self.groups[-1]

    def placement_group_table(self, group: Any) -> dict[str, Any]:
        return {"state": "CREATED", "bundles_to_node_id": dict.fromkeys(range(len(group.bundle_specs)), "n1")}

    def remove_placement_group(self, group: Any) -> None:
        self.groups.remove(group)

    def remote(self, kind: type) -> Any:
        def make(options: dict[str, Any], arguments: tuple[Any, ...]) -> Actor:
            self.actors.append(Actor(self, kind(*arguments), options))
            return self.actors[-1]

        return SimpleNamespace(
            options=lambda **options: SimpleNamespace(remote=lambda *arguments: make(options, arguments))
        )

    def wait(self, refs: list[Ref], timeout: float) -> tuple[list[Ref], list[Ref]]:
        return [ref for ref in refs if ref.ready], [ref for ref in refs if not ref.ready]

    def get(self, ref: Ref) -> Any:
        if ref.error:
            raise ref.error
        return ref.value

    def kill(self, actor: Actor) -> None:
        actor.dead = True


def install(patch: pytest.MonkeyPatch) -> FakeRay:
    """Put it in the place of Ray, installed or not."""
    ray = FakeRay()
    modules = {
        "ray": ray,
        "ray.exceptions": sys.modules[__name__],
        "ray.util.placement_group": ray,
        "ray.util.scheduling_strategies": SimpleNamespace(
            PlacementGroupSchedulingStrategy=lambda group, placement_group_bundle_index: (
                group,
                placement_group_bundle_index,
            )
        ),
    }
    for name, module in modules.items():
        patch.setitem(sys.modules, name, module)
    return ray
