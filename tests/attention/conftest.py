import os

import torch
from one_thread import one_thread

__all__ = ["one_thread"]

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of a kernel
