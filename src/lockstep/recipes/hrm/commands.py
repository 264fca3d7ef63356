"""The commands `pretrain.py key=value ...` and `evaluate.py checkpoint=FOLDER ...` of HRM's own document.

The arguments of pretrain.py become a `PretrainConfig` on rank 0, which broadcasts it to the other ranks; from it follow
the settings of a run. Keys that it does not know are settings of the run (`log.every=10`, `precision=bf16`,
`task.variant=trm`).

evaluate.py rebuilds a run from its own configuration and trains nothing. With `save_outputs=true` each rank also writes
the answers that it has computed, `answers-rank-0.safetensors` and so on. Further keys are settings of the run
(`task.eval_steps=8`).
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor

import lockstep
from lockstep.errors import UserError
from lockstep.recipes.hrm.carry import Slots
from lockstep.recipes.hrm.data import read_metadata
from lockstep.recipes.hrm.task import HRM
from lockstep.task import Loss

ADJECTIVES = (
    "amber", "brisk", "calm", "dusky", "eager", "frosty", "gentle", "ivory", "keen", "lucid", "nimble", "quiet",
)  # fmt: skip
NOUNS = (
    "badger", "cedar", "delta", "ember", "falcon", "glacier", "harbour", "juniper", "kestrel", "maple", "otter",
)  # fmt: skip

# Options of the task that have a key of their own in PretrainConfig.
TASK_KEYS = ("data_path", "lr", "weight_decay", "puzzle_emb_lr", "puzzle_emb_weight_decay")
SOURCE = ("model.py", "losses.py", "task.py")  # copied into the run folder
# So similar to a key that no other key can be meant; global_batch, a key of any run, is less similar to ours.
SIMILAR = 0.85


# ---- arguments ------------------------------------------------------------------------------------------


def overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse `key=value` arguments. A value is a number, true, false or null where it reads like one, else text.

    `config=F.yaml` stands for the values of a file, which the other arguments override, wherever it stands.
    """
    found: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not key:
            raise UserError(f"the argument {argument!r} is not key=value", "", "type arguments such as lr=1e-4")
        try:
            found[key] = json.loads(text)
        except ValueError:
            found[key] = text
    return _values_of_file(found.pop("config", None)) | found


def _values_of_file(path: str | None) -> dict[str, Any]:
    """Read a YAML file of keys. Nested keys are joined: `task: {width: 64}` is task.width=64."""
    if path is None:
        return {}
    # A list or a text instead of keys has no items(): an AttributeError.
    found = {}
    try:
        for key, value in yaml.safe_load(Path(path).read_text()).items():
            if isinstance(value, dict):
                found |= {f"{key}.{inner}": each for inner, each in value.items()}
            else:
                found[key] = value
    except (OSError, AttributeError, yaml.YAMLError) as error:
        raise UserError(
            f"config={path} cannot be read", f"{type(error).__name__}: {error}", "give a YAML file of keys"
        ) from error
    return found


def help_text(usage: str, keys: Mapping[str, Any]) -> str:
    """Return the usage and every key with its default."""
    options = {name: each.default for name, each in inspect.signature(HRM).parameters.items() if name not in keys}
    return "\n".join(
        [
            usage,
            "",
            *(f"  {name:28} {_typed(value)}" for name, value in keys.items()),
            "",
            "Options of the task:",
            *(f"  {'task.' + name:28} {_typed(value)}" for name, value in options.items()),
            "",
            "Settings of any run are typed likewise, such as log.every=10: see docs/configuration.md.",
        ]
    )


def check_names(values: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse a key that is nearly one of `known`: it would be taken for a setting of the run, with other advice."""
    for key, value in values.items():
        similar = difflib.get_close_matches(key, known, n=1, cutoff=SIMILAR)
        if key not in known and similar:
            raise UserError(f"{key}={_typed(value)} is not known", "", f"type {similar[0]}={_typed(value)}")


def translate(message: str, own_keys: Collection[str] = ()) -> str:
    """Rewrite a message of a run as its settings are typed here: without dashes, and with our own keys."""
    message = re.sub(r"--resume (?=\S)", "resume=", message)
    message = message.replace("type another run_dir", "type another run_name")
    if own_keys:
        message = re.sub(rf"\btask\.({'|'.join(own_keys)})=", r"\1=", message)
    return message


def _typed(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# ---- pretrain.py ----------------------------------------------------------------------------------------


@dataclass
class PretrainConfig:
    """The keys of pretrain.py."""

    data_path: str  # a folder with puzzles in the published layout
    epochs: int = 20_000
    eval_interval: int | None = None  # epochs between two evaluations; None: only at the end
    global_batch_size: int = 768
    lr: float = 1e-4
    lr_min_ratio: float = 1.0  # the last learning rate as a share of lr
    lr_warmup_steps: int = 2000
    weight_decay: float = 1.0
    puzzle_emb_lr: float = 1e-4
    puzzle_emb_weight_decay: float = 1.0
    seed: int = 0
    project_name: str = ""  # a folder around the folders of its runs
    run_name: str = ""
    checkpoint_path: str = ""  # the run folder, if not runs/PROJECT/NAME
    use_distributed_checkpoint: bool = False  # save a checkpoint, written by all ranks, with every evaluation
    rest: dict[str, Any] = field(default_factory=dict)  # settings of the run that have no other name here

    def steps(self, epochs: int) -> int:
        """Count steps as the document does: an epoch is all groups, times the examples of a mean puzzle."""
        metadata = read_metadata(Path(self.data_path) / "train")
        return int(epochs * metadata.total_groups * metadata.mean_puzzle_examples) // self.global_batch_size

    def settings(self) -> dict[str, Any]:
        """Return the settings for `lockstep.fit`."""
        # Epochs become steps; less than one step between evaluations is one.
        evaluate_every = None
        if self.eval_interval is not None:
            evaluate_every = max(1, self.steps(self.eval_interval))
        steps = self.steps(self.epochs)
        if steps < 1:
            raise UserError(
                f"epochs={self.epochs} with global_batch_size={self.global_batch_size} is less than one step",
                f"fewer examples in {self.data_path} than one step takes",
                "type a smaller global_batch_size, or more epochs",
            )

        # A ratio of 1 means that the rate never falls.
        constant = self.lr_min_ratio == 1.0
        return {
            "preset": None,
            "run_dir": self.checkpoint_path or str(Path("runs") / self.project_name / self.run_name),
            "steps": steps,
            "global_batch": self.global_batch_size,
            "seed": self.seed,
            "lr.schedule": "constant" if constant else "cosine",
            "lr.min_ratio": 0.0 if constant else self.lr_min_ratio,
            "lr.warmup": self.lr_warmup_steps,
            "evaluate.every": evaluate_every,
            "checkpoint.every": evaluate_every if self.use_distributed_checkpoint else None,
            # Settings of the run that were typed override those that follow from our own keys.
            **{key: value for key, value in self.rest.items() if not key.startswith("task.")},
            "task": self.options(),
        }

    def options(self) -> dict[str, Any]:
        """Return the options of the task."""
        options = {name: getattr(self, name) for name in TASK_KEYS}
        for key, value in self.rest.items():
            if key.startswith("task."):
                options[key.removeprefix("task.")] = value
        return options


PRETRAIN_KEYS = {each.name: each.default for each in fields(PretrainConfig) if each.name != "rest"}
PRETRAIN_KEYS["data_path"] = "(needed)"


def pretrain_main(arguments: Sequence[str]) -> None:
    """Run pretrain.py: as one of several ranks under torchrun, otherwise alone."""
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if {"--help", "-h"} & {*arguments}:
        usage = "usage: torchrun --nproc-per-node N pretrain.py data_path=FOLDER key=value ..."
        print(help_text(usage, PRETRAIN_KEYS))
        return

    try:
        values = overrides(arguments)
        # Checked before the other ranks wait for rank 0.
        if rank == 0:
            check_values(values)
        if world_size > 1:
            _join()
        config = load_synced_config(values, rank, world_size)
        # The variable of the original code.
        if os.environ.get("DISABLE_COMPILE", "0") not in ("", "0"):
            config.rest.setdefault("compile", False)
        done = lockstep.fit(HRM, config.settings(), again=_command_to_resume)
        if rank == 0:
            copy_source(done.run_dir)
    except UserError as error:
        print(f"pretrain: {translate(str(error), TASK_KEYS)}", file=sys.stderr)
        sys.exit(2)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def check_values(values: Mapping[str, Any]) -> None:
    """Check everything about the arguments of pretrain.py that can be known before any file is read."""
    if "data_path" not in values:
        similar = difflib.get_close_matches("data_path", values, n=1)
        raise UserError(
            "data_path is not set: pretrain.py does not know the folder of the puzzles",
            f"{similar[0]} instead" if similar else "",
            "type data_path=FOLDER; python -m lockstep.recipes.hrm.build makes one",
        )

    check_names(values, PRETRAIN_KEYS)
    named = any(values.get(key) for key in ("run_name", "checkpoint_path", "run_dir"))
    if values.get("resume") == "auto" and not named:
        raise UserError(
            "resume=auto cannot find the run: run_name is not set",
            "without a name every run gets a new folder, so there is nothing to resume",
            "add run_name=NAME, the same each time",
        )


def generate_name() -> str:
    return f"{secrets.choice(ADJECTIVES)}-{secrets.choice(NOUNS)}-{secrets.token_hex(2)}"


def load_synced_config(hydra_config: Mapping[str, Any], rank: int, world_size: int) -> PretrainConfig:
    """Return rank 0's configuration on every rank, whatever arguments the others have.

    It travels as JSON. Collective: every rank must call it.
    """
    # The run gets its name here: each rank would otherwise draw another one.
    text = ""
    if rank == 0:
        check_values(hydra_config)
        config = PretrainConfig(
            **{key: value for key, value in hydra_config.items() if key in PRETRAIN_KEYS},
            rest={key: value for key, value in hydra_config.items() if key not in PRETRAIN_KEYS},
        )
        config.run_name = config.run_name or generate_name()
        text = json.dumps(asdict(config))
    if world_size > 1:
        text = _broadcast_text(text)
    return PretrainConfig(**json.loads(text))


def _broadcast_text(text: str) -> str:
    """Return the text of rank 0 on every rank."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8).to(device)
    # The other ranks do not know the length, so it travels first.
    length = torch.tensor([data.numel()], device=device)
    dist.broadcast(length, src=0)
    if dist.get_rank() != 0:
        data = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(data, src=0)
    return bytes(data.tolist()).decode()


def _join() -> None:
    """Join the process group: NCCL if every rank of this machine has a GPU of its own, else gloo."""
    backend = "gloo"
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        # Ranks that share a GPU have to use gloo: NCCL refuses two ranks on one device.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % gpus)
        if gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
            backend = "nccl"
    dist.init_process_group(backend)


def _command_to_resume(run_dir: Path) -> str:
    return f"the same command with checkpoint_path={run_dir} resume=auto"


def copy_source(run_dir: Path) -> None:
    """Copy the code of the model into the run folder: it may have changed when the weights are used again."""
    (run_dir / "source").mkdir(exist_ok=True)
    for name in SOURCE:
        shutil.copy(Path(__file__).with_name(name), run_dir / "source" / name)


# ---- evaluate.py ----------------------------------------------------------------------------------------

EVALUATE_KEYS = {"checkpoint": "(needed: a run, or one of its checkpoints)", "save_outputs": False}


class Recording(HRM):
    """The task, which also keeps this rank's answers of an evaluation."""

    answers: list[dict[str, Tensor]]

    def eval_loss(self, model: Any, batch: Slots) -> Loss:
        # Only the last of all segments counts: each call replaces the answer of the one before.
        last: dict[str, Tensor] = {}
        hook = model.register_forward_hook(
            lambda module, inputs, thought: last.update(predictions=thought.logits.argmax(dim=-1))
        )
        try:
            loss = super().eval_loss(model, batch)
        finally:
            hook.remove()

        kept = {"inputs": batch["inputs"], "labels": batch["labels"], **last}
        self.answers = [*getattr(self, "answers", []), {name: rows.cpu() for name, rows in kept.items()}]
        return loss


def evaluate_main(arguments: Sequence[str]) -> None:
    """Run evaluate.py: as one of several ranks under torchrun, otherwise alone."""
    if {"--help", "-h"} & {*arguments}:
        print(help_text("usage: python evaluate.py checkpoint=RUN key=value ...", EVALUATE_KEYS))
        return

    try:
        values = overrides(arguments)
        check_names(values, EVALUATE_KEYS)
        if "checkpoint" not in values:
            raise UserError(
                "checkpoint is not set: evaluate.py does not know which run to evaluate",
                "",
                "type checkpoint=runs/NAME",
            )
        checkpoint = Path(values.pop("checkpoint"))
        done = evaluate_checkpoint(checkpoint, bool(values.pop("save_outputs", False)), **values)
    except UserError as error:
        print(f"evaluate: {translate(str(error))}", file=sys.stderr)
        sys.exit(2)

    if os.environ.get("RANK", "0") == "0":
        metrics = done.summary["eval_metrics"]
        print("  ".join(f"{name} {value:.4f}" for name, value in sorted(metrics.items())))


def evaluate_checkpoint(checkpoint: Path, save_outputs: bool = False, **more: Any) -> lockstep.RunResult:
    """Evaluate `checkpoint`, a run folder or one of its checkpoints, as a new run that takes no step."""
    run, weights, step = _find_checkpoint(checkpoint)
    values: dict[str, Any] = {
        "run_dir": str(Path("runs") / f"{run.name}-at-{step}-{generate_name()}"),
        "resume": str(weights),
        "steps": step,
        "goals": [],
        "evaluate.at_end": True,
        **more,
    }
    done = lockstep.fit(Recording if save_outputs else HRM, str(run / "config.yaml"), **values)

    # Each rank has its own part of the samples.
    answers = getattr(done.task, "answers", [])
    if answers:
        from safetensors.torch import save_file

        name = f"answers-rank-{os.environ.get('RANK', 0)}.safetensors"
        save_file({key: torch.cat([each[key] for each in answers]) for key in answers[0]}, done.run_dir / name)
    return done


def _find_checkpoint(checkpoint: Path) -> tuple[Path, Path, int]:
    """Return the run folder, the checkpoint to load, and its step."""
    if _step_of(checkpoint) is None:
        run = checkpoint
        folders = list((run / "checkpoints").glob("step-*"))
    else:
        run = checkpoint.resolve().parent.parent
        folders = [checkpoint]

    # A killed run may have left an unfinished checkpoint, whose name does not end with the step.
    steps = {step: path for path in folders if (step := _step_of(path)) is not None}
    if not steps or not (run / "config.yaml").exists():
        raise UserError(
            f"checkpoint={checkpoint} is not a run with a checkpoint",
            "" if checkpoint.exists() else "no such folder",
            "type checkpoint=RUN or checkpoint=RUN/checkpoints/step-NNNNNNNN, where RUN is the folder of a run",
        )
    if other := _other_recipe(run):
        raise UserError(f"checkpoint={checkpoint} is a run of {other}", "", "type the folder of a run of hrm")
    return run, steps[max(steps)], max(steps)


def _other_recipe(run: Path) -> str | None:
    """Return the recipe of the run if it is another one. Your own task, derived from HRM, may have any name."""
    with (run / "events.jsonl").open() as lines:
        events = [json.loads(line) for line in lines]
    # A resumed run has several starts.
    tasks = [event["task"] for event in events if event["event"] == "start"]
    if not tasks:
        return None

    recipes = {path.parent.name for path in Path(__file__).parents[1].glob("*/__init__.py")} - {"hrm"}
    for name in recipes:
        if tasks[-1].replace("_", "") == name.replace("_", ""):
            return name
    return None


def _step_of(path: Path) -> int | None:
    found = re.fullmatch(r"step-(\d+)", path.name)
    return int(found[1]) if found else None
