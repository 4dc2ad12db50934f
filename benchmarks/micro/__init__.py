"""Single functions, measured with pytest-benchmark: `python -m pytest benchmarks/micro`."""
