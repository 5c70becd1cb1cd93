"""``indexer-ops demo``: a small DeepSeek-V4, trained on real text with the distillation loss and without it.

``command`` is the way in; ``text``, ``model`` and ``training`` make the two runs, ``evaluation`` looks into their
layers on held-out text, ``measure`` turns what it sees into numbers, ``report`` and ``plot`` show them. Only
``command`` and ``text`` do without transformers, matplotlib and rich (``pip install 'indexer-ops[demo]'``).
"""
