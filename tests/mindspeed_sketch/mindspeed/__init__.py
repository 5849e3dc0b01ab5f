"""A sketch of MindSpeed (core 0.15 and before) for proofs: its module paths, signatures and defects, and nothing else of it."""
