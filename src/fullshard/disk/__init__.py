"""Values on a disk: a file with checksums, and tensors whose values lie in it."""
