"""A small GPT that learns to write Python from the standard library's source, character by character."""

from lockstep.recipes.char_lm.task import CharLM

TASK = CharLM
