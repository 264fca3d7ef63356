"""What all tests share."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

import preloaded
from sampled import SAMPLED, out_of_range

if TYPE_CHECKING:
    from pool import Pool

HERE = Path(__file__).parent
UNIT = HERE / "unit"

# The files that take longest, the longest first: some compute all the time, and some wait for most of it.
LONGEST = (
    "test_docs.py",
    "test_verify.py",
    "lab/test_exercises_1_3.py",
    "lab/test_exercises_4_6.py",
    "cluster/test_two_hosts.py",
    "ranks/test_fsdp.py",
    "faults/test_launcher.py",
    "lab/test_bonus.py",
    "ranks/test_compiled_loss.py",
    "recipes/test_clstm_ppo.py",
    "ranks/test_exact.py",
    "lab/test_beyond.py",
    "ranks/test_strategies.py",
    "ranks/test_loaders.py",
    "test_start_check.py",
    "faults/test_nodes.py",
    "ranks/test_optimizers_by_name.py",
    "faults/test_preemption.py",
    "test_api.py",
    "ranks/test_data.py",
    "systems/test_documents.py",
    "test_benchmarks.py",
    "ranks/test_own_schedulers.py",
    "faults/test_stuck.py",
    "ranks/test_keeping.py",
    "ranks/test_compile.py",
    "ranks/test_hooks.py",
    "ranks/test_inner_gradients.py",
    "faults/test_takeover.py",
    "ranks/test_own_updates.py",
    "ranks/test_batchnorm.py",
    "ranks/test_resume.py",
    "ranks/test_guards.py",
    "ranks/test_tensor.py",
    "recipes/test_hrm.py",
    "faults/test_unknown_peers.py",
    "recipes/test_pixel_llm.py",
    "recipes/test_latent_wire_parts.py",
    "ranks/test_compiled_draws.py",
    "unit/checkpoint/test_run_in_memory.py",
    "unit/data/test_own_reads.py",
    "ranks/test_gradient_exact.py",
    "ranks/test_pool.py",
    "ranks/test_late_storage.py",
    "ranks/test_users_model.py",
    "faults/test_torture.py",
    "ranks/test_parameter_hooks.py",
    "unit/engine/test_late_outcomes.py",
    "ranks/test_gathered_rows.py",
    "ranks/test_speeds.py",
    "ranks/test_ema.py",
    "unit/engine/checks/test_same_data.py",
    "ranks/test_callbacks.py",
    "ranks/test_pipeline.py",
    "unit/clusters/test_plain_hosts.py",
    "faults/test_first_screen.py",
    "ranks/test_collective_check.py",
    "ranks/test_bench.py",
    "unit/checkpoint/test_kill.py",
    "systems/test_elastic.py",
)

# No name server is asked: torch looks up the name of every peer, also on this machine, and an answer that gets
# lost costs five seconds: about one of twelve jobs with three ranks or more.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

# Hundreds of processes import the package: without its bytecode each of them would compile it again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False  # pytest rewrites the assertions of all tests otherwise, in each of its workers

# What tests write goes to memory where there is room: a disk makes them wait, and looks long for a free place where
# thousands of files have just been deleted. `--basetemp FOLDER` names another place.
MEMORY = Path("/dev/shm")
ROOM = 4 * 1024**3  # bytes; a session has a few hundred megabytes at a time
if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# Timings never decide: a busy machine is not a broken program.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs, unless `pytest tests/gpu` or LOCKSTEP_TEST_DEVICE asks for them.

    The other tests start more ranks than a machine has GPUs.
    """
    asked = any("gpu" in Path(argument.partition("::")[0]).parts for argument in config.args)
    if not asked and "LOCKSTEP_TEST_DEVICE" not in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):  # it runs tests itself
        gc.disable()  # until all are collected: looking for garbage among what is imported takes over a second
        importlib.import_module("zoo")  # before transformers and timm
    elif config.option.markexpr != "quick":
        preloaded.share()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of single modules as quick, for `make quick`, and put the longest files first.

    A worker of xdist that takes a long file last works on alone while the others have nothing to do.
    """
    # Of whole files all cases are here.
    whole = not any("::" in argument for argument in config.args) and not config.getoption("lf", False)
    _leave_to_test_long(items, whole)
    for item in items:
        takes_seconds = item.get_closest_marker("slow") or item.get_closest_marker("long")
        if item.path.is_relative_to(UNIT) and not takes_seconds:
            item.add_marker(pytest.mark.quick)
    order = {name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.relative_to(HERE).as_posix(), len(order)))


def _leave_to_test_long(items: list[pytest.Item], whole: bool) -> None:
    """Mark what tests/sampled.py leaves out as long; all cases of a test have to be among the items."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        name = getattr(item, "originalname", item.name)
        cases.setdefault(f"{item.path.relative_to(HERE).as_posix()}::{name}", []).append(item)
    if whole and (wrong := out_of_range({test: len(found) for test, found in cases.items()})):
        raise pytest.UsageError(f"tests/sampled.py names places that no case has: {', '.join(wrong)}")
    for test, places in SAMPLED.items():
        found = cases.get(test, [])
        if len(found) <= max(places, default=0):
            continue  # one case was asked for by its name
        for place, item in enumerate(found):
            if place not in places:
                item.add_marker(pytest.mark.long)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import what `-m quick` would leave out anyway."""
    if config.option.markexpr == "quick" and collection_path.name.startswith("test_"):
        return True if not collection_path.is_relative_to(UNIT) else None
    return None


def pytest_collection_finish(session: pytest.Session) -> None:
    """What has been imported stays: no collection of garbage need look at it again."""
    gc.collect()
    gc.freeze()
    gc.enable()
    if hasattr(session.config, "workerinput"):
        preloaded.use_large_pages()  # the graders of the course and data loaders fork this process hundreds of times


@pytest.fixture(scope="module")
def zygotes() -> Iterator[None]:
    """For modules whose tests start runs on several processes from the process of pytest: their zygotes have torch."""
    with preloaded.zygotes():
        yield


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Worker processes for multi-process tests; they start with the first job."""
    from pool import Pool

    made = Pool(tmp_path_factory.getbasetemp())
    yield made
    made.close()
