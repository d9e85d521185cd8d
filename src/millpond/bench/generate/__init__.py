"""`bench generate`: decoding speed and memory through `generate()` beside other caches."""
