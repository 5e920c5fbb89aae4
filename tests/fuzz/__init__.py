"""A differential fuzzer: random programs of users, each compared with the same training unsharded, step by step.

A *program* is drawn from a seed (`programs.py`): a model (`models.py`), how it is sharded and with which settings
(`sharding.py`), where it runs (1 to 4 ranks, a transport, with or without the exchange of memory between storages), and
what its user does in steps and between them (`actions.py`, `steps.py`, `checkpoints.py`). Each rank trains its part of
the sharded model, and beside it a whole reference (`reference.py`) that sees the batches of all ranks. After each
action it compares losses, gradients, parameters and buffers: of parameters and gradients the part that this rank should
hold (`layout.py`), so that comparing communicates nothing and disturbs nothing. Most programs are in fp64, where a
difference of 1e-8 is a defect.

    make fuzz PROGRAMS=5000                          # some programs, from seed FIRST=0 on
    python -m tests.fuzz --programs 5000 --first-seed 1000
    python -m tests.fuzz --seed 17                   # one program, printed as readable text, and what was wrong
    python -m tests.fuzz --seed 17 --shrink          # the same, made as small as it can be and still fail
    python -m tests.fuzz --file program.txt          # a printed program that was changed by hand
    pytest tests/fuzz --programs 500 --first-seed 0  # as a test: in an ordinary run it is a few programs

What becomes of a program (`pool.py`): it is `right`; it `differs`; it `failed` (raised, died or hung); it was `refused`
with an error that stands in `refusals.py`, which has the documented refusals and says in which programs each may come;
or it is `invalid`, because unsharded training itself raised. Findings are programs that differ or failed.

A new way to use the library becomes a new action, layer or setting, drawn with some probability. What is drawn is meant
to be right: what the documentation refuses is not drawn.

`planted.py` has defects that are put into the library on purpose; `test_planted.py` shows that programs find each.
"""
