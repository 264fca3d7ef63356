"""The task: solve puzzles by thinking about each for several segments, and learn when to stop."""

from __future__ import annotations

import difflib
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.errors import ConfigError, UserError
from lockstep.recipes.hrm.adam_atan2 import AdamATan2
from lockstep.recipes.hrm.average import MovingAverage
from lockstep.recipes.hrm.carry import Carry, TrainedBatch, filled
from lockstep.recipes.hrm.data import PuzzleDataset, PuzzleExamples, Puzzles, collate, least_steps, read_puzzles
from lockstep.recipes.hrm.exchange import world_size
from lockstep.recipes.hrm.losses import LOSSES, cell_loss, right_cells, solved
from lockstep.recipes.hrm.model import HierarchicalReasoningModel, ModelConfig
from lockstep.recipes.hrm.presets import PRESETS
from lockstep.recipes.hrm.puzzles import Asked, IdGrid, family
from lockstep.recipes.hrm.score import COUNTS, Question, Scoring
from lockstep.recipes.hrm.sparse import CastedSparseEmbeddingSignSGD_Distributed
from lockstep.task import Loss, Metric, MicroBatch, OnlyWith, Task, without_effect

KINDS = ("sudoku4", "sudoku6", "sudoku9", "maze", "idgrid")
WORDS = {
    "variant": ("hrm", "trm"),
    "grad_cycle": ("one_step", "full"),
    "positions": ("rope", "learned"),
    "mixer": ("attention", "mlp"),
    "loss": tuple(LOSSES),
    "puzzle": KINDS,
}
SUDOKUS = KINDS[:3]
GENERATED = (
    "puzzle", "train_size", "test_size", "data_seed", "holes", "least_guesses", "maze_size", "maze_longer_than",
    "rules", "rule_moves", "augment",
)  # fmt: skip
OF_PUZZLES = (
    OnlyWith(("holes", "least_guesses"), "puzzle", SUDOKUS, found="no Sudokus"),
    OnlyWith(("maze_size", "maze_longer_than"), "puzzle", ("maze",), found="no mazes"),
    OnlyWith(("rules", "rule_moves"), "puzzle", ("idgrid",), found="puzzles that all have one rule"),
)
OF_TABLE = ("puzzle_emb_lr", "puzzle_emb_weight_decay")
AT_LEAST_ONE = ("halt_max_steps", "eval_steps", "layers", "h_cycles", "l_cycles", "puzzle_positions")


class HRM(Task):
    """A step is one segment of every puzzle in the batch. The loss is that of a puzzle: the mean over its cells."""

    unit = "puzzle"
    defaults = {
        "preset": "cpu",
        "tail": "drop",  # a puzzle stays in its slot of the batch: there must be as many in every step
        "lr": {"schedule": "cosine", "min_ratio": 0.1},
    }
    presets = PRESETS
    lasting = ("global_batch",)  # a puzzle stays in its slot
    option_rules = (
        *OF_PUZZLES,
        OnlyWith(GENERATED, "data_path", ("",), found="a folder with puzzles, which are taken as they are"),
        OnlyWith(("augment",), "puzzle", (*SUDOKUS, "maze"), found="grids that are new at every look"),
        OnlyWith(("heads",), "mixer", ("attention",), found="a mixer by fixed weights, not by attention"),
        OnlyWith(("halt_exploration",), "halt_max_steps", never=(1,), found="one segment, and none to go on to"),
        OnlyWith(OF_TABLE, "puzzle_emb_frozen", (False,), found="a table that stays as it is"),
    )
    scoring = Scoring

    def __init__(
        self,
        *,
        puzzle: str = "sudoku4",
        data_path: str = "",
        train_size: int = 2400,
        test_size: int = 600,
        data_seed: int = 0,
        holes: int | None = None,
        least_guesses: float = 0.0,
        maze_size: int = 20,
        maze_longer_than: int = 0,
        rules: int = 16,
        rule_moves: bool = False,
        augment: bool = True,
        variant: str = "hrm",
        width: int = 512,
        heads: int = 8,
        layers: int | None = None,
        h_cycles: int | None = None,
        l_cycles: int | None = None,
        grad_cycle: str | None = None,
        positions: str = "rope",
        mixer: str = "attention",
        puzzle_positions: int | None = None,
        halt_max_steps: int = 16,
        halt_exploration: float = 0.1,
        eval_steps: int | None = None,
        loss: str = "stablemax",
        lr: float = 1e-4,
        weight_decay: float = 1.0,
        puzzle_emb_lr: float = 1e-4,
        puzzle_emb_weight_decay: float = 1.0,
        puzzle_emb_frozen: bool = False,
        ema: float | None = None,
    ):
        """`data_path` is a folder in the published layout; without it the puzzles of kind `puzzle` are made from
        `data_seed`. What is None follows from the variant. `puzzle_emb_frozen` is the control that must fail."""
        idle = without_effect(self, HRM, locals())
        trm = variant == "trm"
        self.puzzle, self.data_path, self.augment = puzzle, data_path, augment
        self.asked = Asked(
            kind=puzzle,
            train_size=train_size,
            test_size=test_size,
            seed=data_seed,
            holes=holes,
            least_guesses=least_guesses,
            size=maze_size,
            longer_than=maze_longer_than,
            rules=rules,
            moves=rule_moves,
            augment=augment,
        )
        self.variant, self.width, self.heads = variant, width, heads
        self.layers = _given(layers, 2 if trm else 4)
        self.h_cycles, self.l_cycles = _given(h_cycles, 3 if trm else 2), _given(l_cycles, 6 if trm else 2)
        self.grad_cycle = grad_cycle or ("full" if trm else "one_step")
        self.positions, self.mixer = positions, mixer
        self.puzzle_positions = _given(puzzle_positions, 16 if trm else 1)
        self.halt_max_steps, self.halt_exploration, self.loss_kind = halt_max_steps, halt_exploration, loss
        self.eval_steps = _given(eval_steps, halt_max_steps)
        self.lr, self.weight_decay = lr, weight_decay
        self.puzzle_emb_lr, self.puzzle_emb_weight_decay = puzzle_emb_lr, puzzle_emb_weight_decay
        self.puzzle_emb_frozen = puzzle_emb_frozen
        self.changing_buffers = () if puzzle_emb_frozen else ("puzzle_emb.table",)
        rate = ema if ema is not None else 0.999 * trm
        self.average = MovingAverage(rate) if rate else None
        self.carry = Carry()
        self._check(idle)

    # ---- what to train ----

    def model(self) -> HierarchicalReasoningModel:
        training, _ = self._splits()
        return HierarchicalReasoningModel(
            ModelConfig(
                symbols=training.symbols,
                cells=training.cells,
                puzzle_ids=training.ids,
                variant=self.variant,
                width=self.width,
                heads=self.heads,
                layers=self.layers,
                h_cycles=self.h_cycles,
                l_cycles=self.l_cycles,
                grad_cycle=self.grad_cycle,
                positions=self.positions,
                mixer=self.mixer,
                puzzle_positions=self.puzzle_positions,
            ),
            self.scoring(self.loss_kind, self.halt_max_steps),
        )

    def optimizer(self, model: Any) -> list[torch.optim.Optimizer]:
        self._sparse = CastedSparseEmbeddingSignSGD_Distributed(
            model.puzzle_emb.buffers(),
            lr=0.0 if self.puzzle_emb_frozen else self.puzzle_emb_lr,
            weight_decay=self.puzzle_emb_weight_decay,
            world_size=world_size(),
        )
        return [AdamATan2(model.parameters(), self.lr, weight_decay=self.weight_decay), self._sparse]

    def data(self) -> Dataset:
        training, _ = self._splits()
        if isinstance(training, IdGrid):
            training.draw_least = partial(least_steps, self.halt_max_steps, self.halt_exploration)
            return training
        return PuzzleDataset(training, self.halt_max_steps, self.halt_exploration)

    def eval_data(self) -> Dataset:
        return PuzzleExamples(self._splits()[1])

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        return collate(samples)

    # ---- a step: one segment ----

    def before_batch(self, micro: MicroBatch) -> None:
        self._micro = micro

    def loss(self, model: Any, batch: TrainedBatch) -> Loss:
        micro, count = self._micro, len(batch["inputs"])
        held = None if micro.padding else self.carry.take(micro.first, count)
        piece = filled(held, batch, partial(model.start, count))
        steps = piece["steps"] + 1
        puzzle = model.puzzle_emb(piece["ids"])
        thought = model(
            piece["z_h"], piece["z_l"], piece["inputs"], puzzle,
            look_ahead=self.variant == "hrm",
            begin=piece.pop("begin"),
            question=Question(piece["labels"], steps, piece["least"]),
        )  # fmt: skip
        total, halted, counts = thought.score
        if not micro.padding:
            self._sparse.note(micro.first, piece["ids"], puzzle)
            now = {"z_h": thought.z_h, "z_l": thought.z_l, "steps": steps, "halted": halted}
            self.carry.put(micro.first, piece | now)
        return Loss(total, count, _metrics(counts))

    def eval_loss(self, model: Any, batch: TrainedBatch) -> Loss:
        """All segments, with the average of the weights where there is one. `exact_K` is the share solved after K."""
        if self.average is None:
            return self._think(model, batch)
        with self.average.instead(model):
            return self._think(model, batch)

    def after_step(self, model: nn.Module, step: int) -> None:
        self._sparse.forget()
        self.carry.end_step()
        if self.average is not None:
            self.average.follow(model, step)

    def state_dict(self) -> dict[str, Any]:
        average = self.average.weights if self.average is not None else {}
        return {"carry": self.carry.state_dict(), "average": average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.carry.load_state_dict(state["carry"])
        if self.average is not None:
            self.average.weights = state["average"]

    def _think(self, model: Any, batch: TrainedBatch) -> Loss:
        (z_h, z_l), puzzle = model.start(len(batch["inputs"])), model.puzzle_emb(batch["ids"])
        metrics: dict[str, Metric] = {}
        thought = model(z_h, z_l, batch["inputs"], puzzle)
        for segment in range(1, self.eval_steps):
            if segment & (segment - 1) == 0:  # 1, 2, 4, ...
                metrics[f"exact_{segment}"] = solved(*right_cells(thought.logits, batch["labels"])).sum()
            thought = model(thought.z_h, thought.z_l, batch["inputs"], puzzle)
        asked, right = right_cells(thought.logits, batch["labels"])
        exact = solved(asked, right)
        metrics["exact"] = exact.sum()
        metrics["cell"] = (right.sum(), asked.sum())
        metrics["q_halt"] = ((thought.q[:, 0] > 0) == exact).sum()
        total = cell_loss(self.loss_kind, thought.logits, batch["labels"]).sum()
        return Loss(total.float(), len(exact), metrics)

    # ---- options ----

    def _splits(self) -> tuple[Any, Puzzles]:
        if not self.data_path:
            return family(self.asked)
        training, test = (read_puzzles(Path(self.data_path) / split) for split in ("train", "test"))
        return training, test

    def _check(self, idle: list[UserError]) -> None:
        """Every wrong option at once."""
        problems = idle + [
            UserError(
                f"task.{name}={value}", f"none of {', '.join(words)}", f"type task.{name}={_nearest(value, words)}"
            )
            for name, words in WORDS.items()
            if (value := self.loss_kind if name == "loss" else getattr(self, name)) not in words
        ]
        if self.mixer == "attention" and (self.heads < 1 or self.width % (2 * self.heads)):
            problems.append(
                UserError(
                    f"task.width={self.width} with task.heads={self.heads}",
                    "each head needs the same even number of channels",
                    f"type task.width={-(-self.width // (2 * max(1, self.heads))) * 2 * max(1, self.heads)}",
                )
            )
        sizes = {name: getattr(self.asked, name) for name in ("train_size", "test_size", "rules")}
        sizes |= {name: getattr(self, name) for name in AT_LEAST_ONE}
        problems += [
            UserError(f"task.{name}={value}", f"less than {least}", f"type task.{name}={least} or more")
            for name, value in (sizes | {"maze_size": self.asked.size}).items()
            if value < (least := 3 if name == "maze_size" else 1)
        ]
        asked = self.asked
        if self.puzzle == "sudoku9" and asked.seed and asked.holes is None and not asked.least_guesses:
            problems.append(
                UserError(
                    f"task.data_seed={asked.seed} with task.puzzle=sudoku9",
                    "puzzles that come with the recipe, the same ones for every seed",
                    "leave task.data_seed out, or type task.holes=50: those are made from the seed",
                )
            )
        if problems:
            raise ConfigError(problems)


def _metrics(counts: Tensor) -> dict[str, Metric]:
    of = dict(zip(COUNTS, counts.unbind(), strict=True))
    share = {name: (of[name], of["ended"]) for name in ("exact", "q_halt", "segments")}
    return {**share, "cell": (of["cells"], of["all_cells"])}


def _given(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def _nearest(word: str, known: tuple[str, ...]) -> str:
    return difflib.get_close_matches(word, known, n=1, cutoff=0.0)[0]
