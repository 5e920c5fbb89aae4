"""Faults done for real to small training programs: each rank must train right, or end in time with a clear error.

`python -m tests.faults --programs 2000 --first-seed 0` runs random programs with random faults; pytest runs a few, and
one of each kind on every transport.
"""
