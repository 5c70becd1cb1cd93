"""Triton kernels and their launchers. Imported as ``indexer_ops._triton``, on the first call that needs one."""
