"""The programs of a benchmark's ranks: generators that yield one measurement per turn. All of them import torch."""
