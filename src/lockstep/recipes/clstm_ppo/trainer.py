"""The recipe behind the names of a multi-GPU trading script: `train_distributed_clstm_ppo.py --num_gpus 2`.

Nothing trains here: `lockstep.fit` starts the processes, and the recipe says what they do.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import lockstep
from lockstep.errors import RanksFailed, UserError
from lockstep.recipes.clstm_ppo.gpu_optimizations import launched, processes
from lockstep.recipes.clstm_ppo.market import HELD_OUT
from lockstep.recipes.clstm_ppo.model import Agent
from lockstep.recipes.clstm_ppo.task import TEST_SEED, ClstmPpo
from lockstep.recipes.clstm_ppo.yardsticks import Greedy, play


class DistributedCLSTMPPOTrainer:
    """`batch_size` counts environments per process and optimizer step, cut into `gradient_accumulation_steps`
    micro-batches. How many trade at once, and how many updates make `num_episodes`, follow from it."""

    def __init__(
        self,
        num_gpus: int = -1,
        num_episodes: int = 5000,
        batch_size: int = 128,
        *,
        gradient_accumulation_steps: int = 4,
        preset: str | None = None,
        **settings: Any,
    ):
        """`num_gpus` -1: all of them. `settings` are those of any run, such as run_dir, seed or precision."""
        for name, value in (("num_episodes", num_episodes), ("batch_size", batch_size)):
            if value < 1:
                raise UserError(f"--{name} {value}", "less than 1", f"type --{name} 1 or more")
        if batch_size % gradient_accumulation_steps:
            raise UserError(
                f"--batch_size {batch_size} in {gradient_accumulation_steps} micro-batches",
                "micro-batches of different sizes",
                f"type --batch_size {-(-batch_size // gradient_accumulation_steps) * gradient_accumulation_steps}",
            )
        self.processes = processes(num_gpus)
        self.num_episodes, self.batch_size = num_episodes, batch_size
        self.micro_batch = batch_size // gradient_accumulation_steps
        self.preset = preset or ("gpu" if torch.cuda.is_available() else "cpu")
        self.settings = settings
        self.result: lockstep.RunResult | None = None

    def initialize(self) -> None:
        """Make the task, with its environments, and an agent that has learnt nothing yet."""
        values = ClstmPpo.presets[self.preset]
        steps = self._steps(ClstmPpo(**values["task"]))
        self.task = ClstmPpo(**values["task"] | in_proportion(values, steps))
        self.agent: Agent = self.task.model()
        rest = {key: value for key, value in values.items() if key not in ("task", "global_batch", "steps")}
        self.values = rest | {
            "preset": None,
            "local_batch": self.batch_size,
            "micro_batch": self.micro_batch,
            "steps": steps,
        }

    def train(self) -> dict[str, Any]:
        """Train on all processes, to the end. The metrics of the run."""
        if not hasattr(self, "agent"):
            self.initialize()
        several = self.processes if self.processes > 1 and not launched() else None
        self.result = lockstep.fit(self.task, self.values, nproc=several, **self.settings)
        self.agent = self.result.model  # pyrefly: ignore[bad-assignment]
        return self._gather_metrics()

    def _steps(self, task: ClstmPpo) -> int:
        """Optimizer steps: a rollout's worth of days for every environment, until that many episodes are full."""
        settings = task.source.settings
        environments = self.processes * self.batch_size * settings.minibatches
        updates = math.ceil(self.num_episodes * task.game.days / (environments * settings.days))
        return updates * settings.epochs * settings.minibatches

    def _run_episode(self, episode: int = 0) -> dict[str, float]:
        """One test episode of the agent as it is now."""
        game = self.task.game
        played = play(Greedy(self.agent), game.open(TEST_SEED, HELD_OUT + torch.tensor([episode])), game.days)
        report = {name: float(values[0]) for name, values in played.report().items()}
        return {"score": float(played.scores[0]), "trades": float(played.trades[0]), **report}

    def _gather_metrics(self) -> dict[str, Any]:
        """What all processes have measured together: sums and weights were added, and divided once."""
        assert self.result is not None
        lines = (self.result.run_dir / "metrics.jsonl").read_text().splitlines()
        return self.result.summary | {"last_interval": json.loads(lines[-1])}

    def _save_checkpoint(self, path: str | Path) -> Path:
        """The agent's weights as one file. The run's own checkpoints, to go on from, are in its folder."""
        from safetensors.torch import save_model

        save_model(self.agent, str(path))
        return Path(path)


def in_proportion(preset: dict[str, Any], steps: int) -> dict[str, int]:
    """Options for the first updates of a run, which take the same share of `steps` as they do in the preset. A short
    run would otherwise be over before PPO has begun, or before trading costs what it costs."""
    options, share = preset["task"], steps / preset["steps"]
    return {name: math.ceil(options[name] * share) for name in ("foresight", "cost_warmup") if name in options}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train the trading agent of the recipe clstm_ppo.")
    parser.add_argument("--num_gpus", type=int, default=-1, help="GPUs to use (-1 for all, default: -1)")
    parser.add_argument("--num_episodes", type=int, default=5000, help="training episodes (default: 5000)")
    parser.add_argument("--batch_size", type=int, default=128, help="batch size per GPU (default: 128)")
    parser.add_argument("--preset", choices=list(ClstmPpo.presets), help="size of the agent (default: by the machine)")
    parser.add_argument("--run_dir", help="folder of the run (default: runs/clstmppo-TIME)")
    parser.add_argument(
        "--resume", metavar="auto|PATH|never", default="never", help="go on in --run_dir, or from a run"
    )
    options = parser.parse_args(arguments)
    place = {"run_dir": options.run_dir, "resume": options.resume, "again": partial(typed_again, parser, options)}
    try:
        trainer = DistributedCLSTMPPOTrainer(
            options.num_gpus, options.num_episodes, options.batch_size, preset=options.preset, **place
        )
        trainer.initialize()
        found = trainer.train()
    except RanksFailed:
        return 2
    except UserError as error:
        print(f"train_distributed_clstm_ppo: {error}", file=sys.stderr)
        return 2
    if os.environ.get("RANK", "0") == "0":
        print(f"score per test episode: {found['eval_metrics']['score']:.4f}")
    return 0


def typed_again(parser: argparse.ArgumentParser, options: argparse.Namespace, run_dir: Path) -> str:
    """The command that goes on in `run_dir`."""
    words = vars(options) | {"run_dir": run_dir, "resume": "auto"}
    changed = {name: value for name, value in words.items() if value != parser.get_default(name)}
    return shlex.join(["python", sys.argv[0], *(str(word) for name, v in changed.items() for word in (f"--{name}", v))])
