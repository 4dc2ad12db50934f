"""The one part of the build that pyproject.toml cannot say: a native library that is welcome and not required."""

import runpy
from pathlib import Path

from setuptools import Extension, setup

HOST = Path("kernels/host")
GIO = Path("kernels/gio")
CCCL = runpy.run_path("kernels/gio_native.py")["cccl"]()  # the atomics of libcu++; without them the standard's do

setup(
    ext_modules=[
        Extension(
            "tutti_sglang.kernels._host",
            sources=sorted(map(str, HOST.glob("*.cpp"))),
            depends=["kernels/faults.hpp", *sorted(map(str, HOST.glob("*.hpp")))],
            extra_compile_args=["-std=c++20", "-O3", "-g0", "-Wall", "-Wextra", "-fvisibility=hidden"],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,  # without a C++20 compiler the installation goes on, and kernels/native.py says so
        ),
        Extension(
            "tutti_sglang.kernels._gio",
            sources=sorted(map(str, GIO.glob("*.cpp"))),
            depends=["kernels/faults.hpp", *sorted(map(str, [*GIO.glob("*.hpp"), *GIO.glob("*.cuh")]))],
            extra_compile_args=["-std=c++20", "-O2", "-Wall", "-Wextra", *(["-isystem", str(CCCL)] if CCCL else [])],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        ),
    ]
)
