"""``python -m indexer_ops`` is the ``indexer-ops`` command."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
