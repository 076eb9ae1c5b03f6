"""The states of one sequence: paged KV, sparse-attention indexers, n-gram layers, recurrent states, all in lockstep."""
