"""For tests of this library, of its tiers and codecs, and of actors that use it."""
