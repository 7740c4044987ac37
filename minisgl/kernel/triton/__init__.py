"""Triton kernels for NVIDIA GPUs. Every module holds one kernel, what launches it, and what it must compute.

The same kernels run on CPU tensors under TRITON_INTERPRET=1, which is how they are tested without a GPU.
"""
