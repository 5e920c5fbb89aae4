"""The tests of fullshard: folders mirror the source tree, and share the helpers of `tests.harness`.

With `FULLSHARD_TESTS_NO_EXCHANGE=1` storages cannot exchange their memory, as with torch before 2.12.
"""

import os
from typing import Any

import torch

if os.environ.get("FULLSHARD_TESTS_NO_EXCHANGE"):
    storage: Any = torch.UntypedStorage
    storage._swap_data_ptr_ = None
