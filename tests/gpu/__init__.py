"""Tests of an accelerator: streams, device memory, offload, native allocators. Whole steps run on the CPU elsewhere."""
