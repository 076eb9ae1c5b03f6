"""Ray actors around the plain classes of `tiered_cache.service`: names, handles, deadlines, and nothing else."""
