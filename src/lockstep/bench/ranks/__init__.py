"""What the ranks of a benchmark run: generators that yield one measurement per turn. All of them import torch."""
