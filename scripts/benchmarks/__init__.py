"""The parts of ``scripts/bench.py``: what is measured, how it is timed, and how it is reported."""
