"""Recurrent PPO with cascaded LSTMs that learns to trade in a market whose hidden regime it must infer."""

from lockstep.recipes.clstm_ppo.task import ClstmPpo

TASK = ClstmPpo
