"""The parts of the service as plain classes: owner of sequences, tiering of a node, router of restores."""
