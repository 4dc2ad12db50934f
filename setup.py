"""The one part of the build that pyproject.toml cannot say: a native library that is welcome and not required."""

from pathlib import Path

from setuptools import Extension, setup

HOST = Path("kernels/host")

setup(
    ext_modules=[
        Extension(
            "tutti_sglang.kernels._host",
            sources=sorted(map(str, HOST.glob("*.cpp"))),
            depends=sorted(map(str, HOST.glob("*.hpp"))),
            extra_compile_args=["-std=c++20", "-O3", "-Wall", "-Wextra", "-fvisibility=hidden"],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,  # without a C++20 compiler the installation goes on, and kernels/native.py says so
        )
    ]
)
