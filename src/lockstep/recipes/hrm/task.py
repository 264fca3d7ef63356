"""The task of hrm: solve puzzles by thinking about each for several segments, and learn when to stop."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from lockstep.errors import UserError
from lockstep.recipes.hrm.carry import Carry, Slots, refill, world_size
from lockstep.recipes.hrm.data import PuzzleExamples, PuzzleGroups, collate
from lockstep.recipes.hrm.losses import COUNTS, LOSSES, Scoring, SegmentTargets, cell_loss, correct_cells, solved
from lockstep.recipes.hrm.model import HierarchicalReasoningModel, HRMOptions, ModelConfig
from lockstep.recipes.hrm.optimizers import AdamATan2, CastedSparseEmbeddingSignSGD_Distributed, MovingAverage
from lockstep.recipes.hrm.presets import PRESETS
from lockstep.recipes.hrm.puzzles import KINDS, SUDOKUS, PuzzleOptions, make_splits
from lockstep.recipes.options import OnlyWith, check_options, takes_options, uneven_heads, warn_unused
from lockstep.task import Loss, Metric, MicroBatch, RunView, StepResult, Task

CHOICES = {
    "variant": ("hrm", "trm"),
    "grad_cycle": ("one_step", "full"),
    "positions": ("rope", "learned"),
    "mixer": ("attention", "mlp"),
    "loss": tuple(LOSSES),
    "puzzle": KINDS,
}
# The smallest value of options that count something.
AT_LEAST = {
    "train_size": 1, "test_size": 1, "rules": 1, "maze_size": 3, "halt_max_steps": 1, "eval_steps": 1, "layers": 1,
    "h_cycles": 1, "l_cycles": 1, "puzzle_positions": 1,
}  # fmt: skip
VARIANT_EMA = {"hrm": 0.0, "trm": 0.999}

# Options that have no effect with some values of others.
OF_GENERATED = (
    "puzzle", "train_size", "test_size", "data_seed", "holes", "least_guesses", "maze_size", "maze_longer_than",
    "rules", "rule_moves", "augment",
)  # fmt: skip
OF_PUZZLES = (
    OnlyWith(("holes", "least_guesses"), "puzzle", SUDOKUS, found="no Sudokus"),
    OnlyWith(("maze_size", "maze_longer_than"), "puzzle", ("maze",), found="no mazes"),
    OnlyWith(("rules", "rule_moves"), "puzzle", ("idgrid",), found="puzzles that all have one rule"),
)


@dataclass(frozen=True, kw_only=True)
class HaltingOptions:
    # The most segments for one puzzle.
    halt_max_steps: int = 16

    # The share of training puzzles that have to run for more than one segment.
    halt_exploration: float = 0.1

    # Segments in an evaluation. None: halt_max_steps.
    eval_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class LearningOptions:
    # stablemax or softmax.
    loss: str = "stablemax"
    lr: float = 1e-4
    weight_decay: float = 1.0

    # The same for the table of puzzle vectors.
    puzzle_emb_lr: float = 1e-4
    puzzle_emb_weight_decay: float = 1.0

    # The control that must fail: the table stays zero.
    puzzle_emb_frozen: bool = False

    # The rate of a moving average of the weights, which is used in evaluations. 0: none; None: 0.999 for trm.
    ema: float | None = None


class HRM(Task):
    """A training step runs one segment of every puzzle in the batch. The loss is the mean over a puzzle's cells."""

    unit = "puzzle"
    defaults = {
        "preset": "cpu",
        "tail": "drop",  # a puzzle stays in its slot of the batch, so every step must have the same slots
        "lr": {"schedule": "cosine", "min_ratio": 0.1},
    }
    presets = PRESETS
    fixed_settings = ("global_batch",)  # the slots belong to the state
    option_rules = (
        *OF_PUZZLES,
        OnlyWith(OF_GENERATED, "data_path", ("",), found="a folder with puzzles, which are taken as they are"),
        OnlyWith(("augment",), "puzzle", (*SUDOKUS, "maze"), found="grids that are drawn again every time"),
        OnlyWith(("heads",), "mixer", ("attention",), found="a mixer by fixed weights, not by attention"),
        OnlyWith(("halt_exploration",), "halt_max_steps", never=(1,), found="one segment, after which all halt"),
        OnlyWith(
            ("puzzle_emb_lr", "puzzle_emb_weight_decay"),
            "puzzle_emb_frozen",
            (False,),
            found="a table that stays as it is",
        ),
    )
    scoring = Scoring  # scores training segments; a subclass of the task may replace it
    collate = staticmethod(collate)

    @takes_options(PuzzleOptions, HRMOptions, HaltingOptions, LearningOptions)
    def __init__(self, puzzles: PuzzleOptions, model: HRMOptions, halting: HaltingOptions, learning: LearningOptions):
        options = vars(puzzles) | vars(model) | vars(halting) | vars(learning)
        warn_unused(HRM, self.option_rules, options)
        self.puzzles = puzzles
        self.model_options = model.filled_in()
        self.halting = halting
        self.learning = learning

        problems = [*uneven_heads(model.width, model.heads)] if model.mixer == "attention" else []
        if puzzles.shipped and puzzles.data_seed:
            problems.append(
                UserError(
                    f"task.data_seed={puzzles.data_seed} with task.puzzle=sudoku9 has no effect",
                    "puzzles that come with the recipe, the same for every seed",
                    "leave task.data_seed out, or set task.holes=50: those are made from the seed",
                )
            )

        check_options(options | vars(self.model_options), problems, CHOICES, AT_LEAST)

        # The table is a buffer that training changes, so `exact=true` is refused unless it is frozen.
        self.changing_buffers = () if learning.puzzle_emb_frozen else ("puzzle_emb.table",)
        ema = VARIANT_EMA[model.variant] if learning.ema is None else learning.ema
        self.average = MovingAverage(ema) if ema else None
        self.carry = Carry()

    # ---- what to train ----

    def model(self) -> HierarchicalReasoningModel:
        training, _ = make_splits(self.puzzles)
        config = ModelConfig(
            symbols=training.symbols, cells=training.cells, puzzle_ids=training.ids, **vars(self.model_options)
        )
        return HierarchicalReasoningModel(config, self.scoring(self.learning.loss, self.halting.halt_max_steps))

    def optimizer(self, model: Any) -> list[torch.optim.Optimizer]:
        options = self.learning
        self._table_optimizer = CastedSparseEmbeddingSignSGD_Distributed(
            model.puzzle_emb.buffers(),
            lr=0.0 if options.puzzle_emb_frozen else options.puzzle_emb_lr,
            weight_decay=options.puzzle_emb_weight_decay,
            world_size=world_size(),
        )
        return [AdamATan2(model.parameters(), options.lr, weight_decay=options.weight_decay), self._table_optimizer]

    def data(self) -> Dataset:
        return PuzzleGroups(make_splits(self.puzzles)[0], self.halting.halt_max_steps, self.halting.halt_exploration)

    def eval_data(self) -> Dataset:
        return PuzzleExamples(make_splits(self.puzzles)[1])

    # ---- a step: one segment ----

    def before_batch(self, run: RunView, micro: MicroBatch) -> None:
        self._micro = micro

    def loss(self, model: Any, batch: Slots) -> Loss:
        """Run one segment of the puzzles in the slots of this micro-batch, and keep their states for the next step."""
        micro = self._micro
        count = len(batch["inputs"])

        # A padding batch has no slots of its own: it only keeps this rank in step with the others.
        held = None if micro.padding else self.carry.take(micro.sample_offset, count)
        slots = refill(held, batch, lambda: model.start(count))
        steps = slots["steps"] + 1
        puzzle = model.puzzle_emb(slots["ids"])
        thought = model(
            slots["z_h"], slots["z_l"], slots["inputs"], puzzle,
            look_ahead=self.model_options.variant == "hrm",
            begin=slots.pop("begin"),
            question=SegmentTargets(slots["labels"], steps, slots["least"]),
        )  # fmt: skip

        # The next step continues from here.
        total, halted, counts = thought.score
        if not micro.padding:
            self._table_optimizer.note(micro.sample_offset, slots["ids"], puzzle)
            self.carry.put(
                micro.sample_offset, {**slots, "z_h": thought.z_h, "z_l": thought.z_l, "steps": steps, "halted": halted}
            )

        # All metrics are over the puzzles that end with this segment.
        sums = dict(zip(COUNTS, counts.unbind(), strict=True))
        metrics: dict[str, Metric] = {name: (sums[name], sums["ended"]) for name in ("exact", "q_halt", "segments")}
        return Loss(total, count, {**metrics, "cell": (sums["cells"], sums["all_cells"])})

    def after_step(self, run: RunView, result: StepResult | None) -> None:
        self._table_optimizer.forget()
        self.carry.end_step()
        if self.average is not None:
            self.average.follow(run.model, run.steps_done)

    def state_dict(self) -> dict[str, Any]:
        return {"carry": self.carry.state_dict(), "average": self.average.weights if self.average is not None else {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.carry.load_state_dict(state["carry"])
        if self.average is not None:
            self.average.weights = state["average"]

    # ---- evaluation: all segments ----

    def eval_loss(self, model: Any, batch: Slots) -> Loss:
        """Run all segments, with the average of the weights if there is one. `exact_K` is `exact` after K segments."""
        labels = batch["labels"]
        metrics: dict[str, Metric] = {}
        with nullcontext() if self.average is None else self.average.instead(model):
            z_h, z_l = model.start(len(batch["inputs"]))
            puzzle = model.puzzle_emb(batch["ids"])
            thought = model(z_h, z_l, batch["inputs"], puzzle)

            for segment in range(1, self.halting.eval_steps or self.halting.halt_max_steps):
                # Reported after 1, 2, 4, ... segments.
                if segment & (segment - 1) == 0:
                    metrics[f"exact_{segment}"] = solved(*correct_cells(thought.logits.argmax(dim=-1), labels)).sum()

                thought = model(thought.z_h, thought.z_l, batch["inputs"], puzzle)

        # The last segment gives the answer that counts.
        labelled, correct = correct_cells(thought.logits.argmax(dim=-1), labels)
        exact = solved(labelled, correct)
        metrics["exact"] = exact.sum()
        metrics["cell"] = (correct.sum(), labelled.sum())
        metrics["q_halt"] = ((thought.q[:, 0] > 0) == exact).sum()
        return Loss(cell_loss(self.learning.loss, thought.logits, labels).sum().float(), len(exact), metrics)
