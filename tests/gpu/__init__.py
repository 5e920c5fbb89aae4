"""Tests that need an accelerator: streams, device memory, offload, native allocators. Skipped elsewhere."""
