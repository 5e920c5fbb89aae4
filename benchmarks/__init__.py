"""fullshard beside torch's FSDP2, FSDP1 and DDP, on the same work in one run; ``run.py`` is the command."""
