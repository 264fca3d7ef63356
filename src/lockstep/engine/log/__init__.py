"""The texts that a run writes about itself: the banner, log lines, the samples of each step, the summary."""
