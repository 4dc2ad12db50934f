"""Benchmarks: each is `python -m benchmarks.<name>` and says where, how and against what it measured."""
