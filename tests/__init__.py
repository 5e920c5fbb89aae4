"""The tests of fullshard: folders mirror the source tree, and share the helpers of `tests.harness`."""
