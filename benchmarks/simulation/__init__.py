"""Models and replay behind `python -m benchmarks.simulate`."""
