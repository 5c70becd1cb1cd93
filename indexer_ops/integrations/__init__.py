"""Adapters for model libraries, each imported on demand: ``import indexer_ops`` needs torch and nothing else."""
