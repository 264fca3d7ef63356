"""DistributedCLSTMPPOTrainer, and what `train_distributed_clstm_ppo.py` runs.

There is no training loop here: `lockstep.fit` starts the processes, and the recipe clstm_ppo says what they do.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model

import lockstep
from lockstep.classic.clstm_ppo.gpu_optimizations import processes, processes_to_start
from lockstep.classic.process_group import current_world
from lockstep.errors import RanksFailed, UserError
from lockstep.precision import PRECISIONS
from lockstep.recipes.clstm_ppo import ClstmPpo
from lockstep.recipes.clstm_ppo.model import Agent, no_half_lstm


class DistributedCLSTMPPOTrainer:
    """A training of the agent by its size: GPUs, episodes, and environments per process and optimizer step.

    How many environments trade at once, and how many updates make `num_episodes`, follows from these numbers.
    """

    def __init__(
        self,
        num_gpus: int = -1,
        num_episodes: int = 5000,
        batch_size: int = 128,
        *,
        gradient_accumulation_steps: int = 4,
        preset: str | None = None,
        precision: str | None = None,
        **settings: Any,
    ):
        """Plan a run on `num_gpus` GPUs (-1: all), with `batch_size` environments per process and step.

        `precision` fp16 has a loss scale that adapts itself; None means the preset's. `settings` are keys of any run's
        configuration, such as run_dir or seed.
        """
        for name, value in (("num_episodes", num_episodes), ("batch_size", batch_size)):
            if value < 1:
                raise UserError(f"--{name} {value} is less than 1", "", f"use --{name} 1 or more")

        if batch_size % gradient_accumulation_steps:
            larger = -(-batch_size // gradient_accumulation_steps) * gradient_accumulation_steps
            raise UserError(
                f"--batch_size {batch_size} does not divide into {gradient_accumulation_steps} micro-batches",
                "",
                f"use --batch_size {larger}",
            )

        # Before anything is started, so that a wrong number is refused at once.
        self.processes = processes(num_gpus)
        self.num_episodes = num_episodes
        self.batch_size = batch_size
        self.micro_batch = batch_size // gradient_accumulation_steps
        self.preset = preset or ("gpu" if torch.cuda.is_available() else "cpu")
        self.precision = precision
        self.settings = settings

        self.result: lockstep.RunResult | None = None

    def initialize(self) -> None:
        """Make the task, with its environments, and an untrained agent."""
        # Options of the first updates depend on the number of steps, which depends on the options of the preset.
        preset = ClstmPpo.presets[self.preset]
        steps = self._steps(ClstmPpo(**preset["task"]))
        self.task = ClstmPpo(**preset["task"] | in_proportion(preset, steps))
        self.agent: Agent = self.task.model()

        # Before anything is started, and not by the first forward.
        on_cpu = self.settings.get("device") == "cpu" or not torch.cuda.is_available()
        if self.precision == "fp16" and on_cpu and self.task.shape.variant == "clstm":
            raise no_half_lstm()

        values = {key: value for key, value in preset.items() if key not in ("task", "global_batch", "steps")}
        self.values = values | {
            "preset": None,
            "local_batch": self.batch_size,
            "micro_batch": self.micro_batch,
            "steps": steps,
        }
        if self.precision is not None:
            self.values["precision"] = self.precision

    def train(self) -> dict[str, Any]:
        """Train on all processes, to the end. Return the metrics of the run."""
        # Scripts call initialize() first; one that does not still trains.
        if not hasattr(self, "agent"):
            self.initialize()

        nproc = processes_to_start(self.processes)
        self.result = lockstep.fit(self.task, self.values, nproc=nproc, **self.settings)
        self.agent = self.result.model  # pyrefly: ignore[bad-assignment]
        return self._gather_metrics()

    def _steps(self, task: ClstmPpo) -> int:
        """Return the optimizer steps in which all environments together trade the days of `num_episodes`."""
        options = task.source.options
        environments = self.processes * self.batch_size * options.minibatches
        updates = math.ceil(self.num_episodes * task.shape.episode / (environments * options.rollout))
        return updates * options.steps

    def _run_episode(self, episode: int = 0) -> dict[str, float]:
        """Play one test episode with the agent as it is now."""
        played = self.task.play_test_episodes(self.agent, torch.tensor([episode]))
        report = {name: float(values[0]) for name, values in played.report().items()}
        return {"score": float(played.scores[0]), "trades": float(played.trades[0]), **report}

    def _gather_metrics(self) -> dict[str, Any]:
        """Return the metrics over all processes: sums and weights were added, and divided once."""
        assert self.result is not None
        # The run has written what all ranks reduced: there is nothing left to gather.
        lines = (self.result.run_dir / "metrics.jsonl").read_text().splitlines()
        return self.result.summary | {"last_interval": json.loads(lines[-1])}

    def _save_checkpoint(self, path: str | Path) -> Path:
        """Save the agent's weights as one file, on the main process only; the others return its path at once.

        The checkpoints to resume from are in the run's own folder.
        """
        if current_world().rank == 0:
            # Renamed when it is complete, so that no reader finds half a file.
            unfinished = Path(f"{path}.unfinished")
            save_model(self.agent, str(unfinished))
            unfinished.replace(path)

        return Path(path)


def in_proportion(preset: dict[str, Any], steps: int) -> dict[str, int]:
    """Return the options of the first updates, so that they take the same share of `steps` as in the preset.

    A short run would otherwise end before PPO begins, or before trading costs what it costs.
    """
    options = preset["task"]
    share = steps / preset["steps"]
    return {name: math.ceil(options[name] * share) for name in ("foresight", "cost_warmup") if name in options}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the arguments say. Return the exit code."""
    # What is trained.
    parser = argparse.ArgumentParser(description="Train the trading agent of the recipe clstm_ppo.")
    parser.add_argument("--num_gpus", type=int, default=-1, help="GPUs to use (-1 for all, default: -1)")
    parser.add_argument("--num_episodes", type=int, default=5000, help="training episodes (default: 5000)")
    parser.add_argument("--batch_size", type=int, default=128, help="batch size per GPU (default: 128)")
    parser.add_argument("--preset", choices=list(ClstmPpo.presets), help="size of the agent (default: by the machine)")
    parser.add_argument(
        "--precision",
        choices=list(PRECISIONS),
        help="number format; fp16 scales the loss by itself (default: the preset's)",
    )

    # Where the run is kept.
    parser.add_argument("--run_dir", help="folder of the run (default: runs/clstmppo-TIME)")
    parser.add_argument(
        "--resume", metavar="auto|PATH|never", default="never", help="resume the run in --run_dir, or another one"
    )
    options = parser.parse_args(arguments)

    try:
        trainer = DistributedCLSTMPPOTrainer(
            options.num_gpus,
            options.num_episodes,
            options.batch_size,
            preset=options.preset,
            precision=options.precision,
            run_dir=options.run_dir,
            resume=options.resume,
            resume_command=partial(resume_command, parser, options),
        )
        trainer.initialize()
        metrics = trainer.train()
    except UserError as error:
        # The launcher has reported what came from a rank.
        if not (isinstance(error, RanksFailed) or hasattr(error, "lockstep_rank")):
            print(f"train_distributed_clstm_ppo: {error}", file=sys.stderr)

        return 2

    # Under torchrun every rank gets here; only rank 0 prints.
    if current_world().rank == 0:
        print(f"score per test episode: {metrics['eval_metrics']['score']:.4f}")

    return 0


def resume_command(parser: argparse.ArgumentParser, options: argparse.Namespace, run_dir: Path) -> str:
    """Return the command that resumes the run in `run_dir`, with the options that were typed."""
    words = ["python", sys.argv[0]]
    for name, value in (vars(options) | {"run_dir": run_dir, "resume": "auto"}).items():
        if value != parser.get_default(name):
            words += [f"--{name}", str(value)]

    return shlex.join(words)
