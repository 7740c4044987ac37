"""Tensor parallelism: how the ranks of one model talk, and how its matrices are cut between them."""
