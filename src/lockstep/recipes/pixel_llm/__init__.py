"""A vision-language model that describes generated scenes: encoder, cross-attention decoder, beam search."""

from lockstep.recipes.pixel_llm.task import PixelLLM

TASK = PixelLLM
