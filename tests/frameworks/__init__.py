"""Programs of frameworks run on fullshard without a changed line, and train as on torch's FSDP.

Each `*_program.py` is a program as a user of that framework writes it: it knows torch's FSDP by name only, trains small
models from their configuration, saves, resumes and exports, and returns what it found. A test is a row of a table: it
runs a program with its options on two ranks with torch's FSDP, and beside it with `FULLSHARD_PATCH=1`, and resumes on
another number of ranks.

The quick lane runs some rows of the frameworks that it has; `make frameworks` has an environment with all of them and
runs all rows.
"""
