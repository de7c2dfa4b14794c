"""Measurements, each a module that says in its first lines what it measures and how it is run."""

import os

from worker.mlx_environment import prepare_mlx

# A proxy is not asked for the servers that a bench starts.
os.environ["no_proxy"] = ",".join(filter(None, (os.environ.get("no_proxy"), "localhost,127.0.0.1,::1")))

prepare_mlx()  # before a bench imports MLX, which then looks for GPUs
