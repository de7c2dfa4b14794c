"""Measurements, each a module that says in its first lines what it measures and how it is run."""

from worker.mlx_environment import prepare_mlx

prepare_mlx()  # before a bench imports MLX, which then looks for GPUs
