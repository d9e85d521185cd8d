"""`bench generate`: decoding speed and memory through `generate()`, compared with other caches."""
