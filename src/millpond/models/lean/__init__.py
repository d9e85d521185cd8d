"""A decoder without its modules: one forward over packed rows, described by the weights alone.

`describe` reads a transformers model of the families of Llama, OPT and GPT-NeoX, and `Decoder` runs what it found.
Knows nothing of caches: attention is a function that the caller brings.
"""
