"""The emulator executes x86-64 on Linux; on a Mac the GPU itself runs tests/kernels/test_metal.py."""

import platform
import sys

if sys.platform != "linux" or platform.machine() != "x86_64":
    collect_ignore_glob = ["test_*.py"]
