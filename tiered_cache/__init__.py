"""Keep LLM sequence state below the GPU: spill it, and restore it exactly on any worker, or refuse."""
