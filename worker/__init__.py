"""Pulls jobs, owns the model: a parent process that speaks RQ, and a child process that speaks MLX."""
