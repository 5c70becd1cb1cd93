"""``indexer-ops bench``: what the ops cost, rung by rung, and how that grows.

``command`` runs it: ``presets`` and ``inputs`` make the operands, ``ladder`` the rungs (``eager`` the lowest), ``gate``
checks them against ``exact``, ``timing`` and ``ceilings`` measure, ``work`` counts, ``growth``, ``comparison`` and
``report`` judge, ``plot`` draws.
"""
