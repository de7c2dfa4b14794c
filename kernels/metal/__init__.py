"""The Metal backend. Knows the layout and the grids; `kernels` decides when it is used."""

from kernels.metal.launcher import Launcher, Plan

__all__ = ["Launcher", "Plan"]
