"""The mistakes that Lockstep can name: what each means and how to fix it.

Two places find out which one it is: the check at the start of a run (`start_check`), and `lockstep verify`
(`verify/diagnose.py`). Some mistakes the engine refuses itself: the `UserError` has the key as its `cause`. To add one,
add a row here, a rule in one of these places, and a broken task to tests/zoo/broken.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Cause:
    """A named mistake: `key` for programs, `title` and `fix` for people, `evidence` from the runs."""

    key: str
    title: str
    fix: str
    evidence: str = ""


# key: (what it is, what to do). docs/verify.md has the same table.
_TABLE = {
    # The loss, its weight, and metrics.
    "mean-of-means": (
        "a mean of means: every micro-batch counts the same, however many terms it has",
        "return Loss(sum of n terms, n), or Loss.mean(their mean, n); weight=1 is right only for a single term",
    ),
    "mean-for-sum": (
        "a mean where a sum is needed: the weight grows with the micro-batch, and the loss does not",
        "use reduction='sum' (or .sum()), or return Loss.mean(mean, n); Lockstep divides once, by the weight of all "
        "ranks",
    ),
    "loss-weight": (
        "a loss weight that counts something other than the terms of the sum",
        "sum over what you count: Loss(token_losses.sum(), weight=number of tokens), not a mean times the batch size; "
        "of a mean over tokens, such as Hugging Face's .loss: Loss.mean(out.loss, number of tokens)",
    ),
    "penalty": (
        "a penalty that is added once per micro-batch: with more micro-batches it weighs more",
        "multiply it by the weight, since sums are divided by it: Loss(total + penalty * n, weight=n)",
    ),
    "batch-coupled": (
        "a loss of one sample that depends on the others in its micro-batch",
        "a contrastive loss, mined examples, mixed samples or statistics over the batch are a different loss in every "
        "split: set micro_batch in the configuration, and treat it as part of the model; mix samples in collate(); "
        "compare with the global batch by run.all_gather(rows)",
    ),
    "gathered": (
        "a loss over the global batch that still depends on the number of ranks",
        "gather all that a sample is compared with, by run.all_gather(rows), which also returns the gradients of other "
        "ranks; count labels from run.row_offset; return a sum over this rank's samples, without a term for the "
        "whole batch",
    ),
    "left-gradient": (
        "a loss that leaves gradients behind: it calls backward() itself",
        "return the loss and leave backward() and optimizer.step() to Lockstep; for a gradient inside the loss use "
        "torch.autograd.grad(..., create_graph=True)",
    ),
    # Statistics and random numbers.
    "batchnorm": (
        "BatchNorm: its statistics are computed over a micro-batch, so they change with the split of the batch",
        "set micro_batch, the same on any number of ranks; or use GroupNorm or LayerNorm, or freeze it (module.eval())",
    ),
    "randomness": (
        "random numbers of its own: dropout, noise or masks that follow the rank or what the process drew before",
        "draw from torch's default generator in model code (it is seeded per step and micro-batch), never from numpy, "
        "random or a generator seeded by the rank, and leave torch.manual_seed out",
    ),
    "augmentation": (
        "augmentation that follows the rank, the process or the clock: the same sample looks different elsewhere",
        "draw in __getitem__ from torch, random or numpy (all are seeded per sample), with data.seed_samples=true and "
        "no seeding by rank, pid or time",
    ),
    "nondeterminism": (
        "two runs in the same layout differ",
        "look for a torch.Generator or np.random.default_rng() without a seed, os.urandom, torch.seed(), the time, the "
        "pid or global state; on a GPU set deterministic=true",
    ),
    # Parameters that the all-reduce misses.
    "not-synchronised": (
        "a parameter that is not the same on all ranks",
        "change parameters on all ranks alike, and only through the optimizer; in after_step no rank may be special",
    ),
    "changed-structure": (
        "a parameter added, replaced, frozen or unfrozen after the model was wrapped: it is never all-reduced",
        "build the full model in model(): create, tie, freeze and replace parameters there",
    ),
    "unused": (
        "a trainable parameter that takes no part in the loss",
        "freeze it (requires_grad=False) in model(), or set ddp.find_unused_parameters=true",
    ),
    # What moves besides the weights.
    "schedule": (
        "a schedule that moves per micro-batch or per rank",
        "use lr.schedule for the rate; anything else that follows the step belongs in after_step(run, result), as a "
        "function of step",
    ),
    "average": (
        "a moving average, or another state of the task, that is updated per micro-batch or per rank",
        "update it once per step, in after_step(run, result), and save it with state_dict()",
    ),
    "carried-state": (
        "state that is carried from one micro-batch to the next: the next one may run on another rank",
        "start every micro-batch afresh, or key what you keep by sample and let data() deliver it",
    ),
    # Ranks and samples.
    "rank-in-loss": (
        "a loss that depends on the rank or on the number of ranks",
        "leave RANK, WORLD_SIZE and torch.distributed out of loss() and model(), and never divide by the number of "
        "ranks; to compare samples with those of other ranks, gather them by run.all_gather(rows)",
    ),
    "data": (
        "samples that are repeated or skipped when there are several ranks, or that differ from rank to rank",
        "return the plain, full dataset from data(): Lockstep shards it; with data.sharding=own split a "
        "stream by RANK and WORLD_SIZE",
    ),
    # Anything else that two trials can disagree about.
    "untied": (
        "weights that were meant to be tied, and are not: they start equal and then drift apart",
        "assign the parameter itself (head.weight = embedding.weight), after any copy, and do not replace it later",
    ),
    "metric": (
        "a metric that is a mean: the mean of the ranks' means is not the mean",
        "return sums in Loss(metrics=...): the number of hits, or (sum, weight)",
    ),
    "changed-in-forward": (
        "a forward that changes the model: each rank then has a different model, after the micro-batches it computed",
        "use a norm without such state (spectral norm: normalise in after_step); update averages and statistics in "
        "after_step(run, result); or name its buffers in the task's changing_buffers",
    ),
    "buffer": (
        "a buffer that every rank updates by itself",
        "keep running statistics out of the forward: compute them in after_step from what all ranks share, or make "
        "them a function of the step",
    ),
    "half-precision": (
        "trainable weights stored in half precision: small updates round away",
        "model.float(); precision=bf16 computes in bf16 from float32 weights",
    ),
    "hook": (
        "a gradient hook on a parameter that depends on the layout: on the rank, or on how the batch is split",
        "let the hook be linear in the gradient, and leave RANK and WORLD_SIZE out of it; clip.norm, clip.value and "
        "clip.adaptive limit the gradient of the whole step",
    ),
    "gradient": (
        "a gradient that is changed on its way: losses agree, and the gradient does not",
        "take hooks on parameters (register_hook) and calls of torch.distributed out of the model; Lockstep "
        "all-reduces gradients",
    ),
    "update": (
        "an update that depends on the layout: the gradients agree, and the weights after the step do not",
        "look at after_step, optimizer hooks and settings that depend on the number of ranks",
    ),
    "bits": (
        "equal up to rounding, and not to the last bit",
        "look for kernels whose result depends on the shape of the batch or differs from run to run, and for tensors "
        "that several blocks read (encoder and decoder), whose gradients are added in another order",
    ),
    # Trials that did not get through.
    "hang": (
        "ranks that wait for each other forever",
        "let every rank do the same: no collective, evaluation or break behind `if rank == 0`; run.stop() ends all",
    ),
    "refused": ("a layout that Lockstep refuses", "do what the message says"),
    "failed": ("a layout that fails", "fix the error; `lockstep train` with the same settings shows all of it"),
    "unknown": (
        "a difference whose cause verify cannot name",
        "compare by hand what differs first, at the step and in the layout named above",
    ),
}

# What to do in a script with its own loop, where there is no loss() that could return a Loss.
_IN_OWN_LOOP = {
    "mean-of-means": "call step.backward(sum, weight=number of terms), with reduction='sum' and no division",
    "mean-for-sum": "use reduction='sum' (or .sum()): step.backward(F.cross_entropy(out, y, reduction='sum'), "
    "weight=len(y)); or multiply the mean by the number of its terms: step.backward(loss * len(y), weight=len(y))",
    "loss-weight": "call step.backward(sum, weight=number of terms), not with a mean times the batch size",
    "changed-in-forward": "take what it changes out of the forward, and do it once per step, after step.apply(): "
    "docs/howto/gan.md has it for spectral norm",
}
CAUSES = {key: Cause(key, title, fix) for key, (title, fix) in _TABLE.items()}


def named(key: str, evidence: str = "") -> Cause:
    return replace(CAUSES[key], evidence=evidence)


def in_own_loop(cause: Cause) -> Cause:
    return replace(cause, fix=_IN_OWN_LOOP.get(cause.key, cause.fix))


def of_failure(key: str, message: str, for_user: bool) -> Cause:
    """Return the cause of a failed trial. `key` is empty if the engine's refusal named no mistake."""
    if not key:
        return named("refused" if for_user else "failed", message)

    # The cause has a title and a fix of its own: of the refusal's text, what was found is new.
    found = message.partition("\n  found: ")[2].partition("\n  do:    ")[0]
    return named(key, found or message)
