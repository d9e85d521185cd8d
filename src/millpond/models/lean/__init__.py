"""A decoder without its modules: one forward over packed rows, described by the weights alone.

`describe` reads a transformers model of the families of Llama, OPT and GPT-NeoX, and `Decoder` runs its description.
Nothing here knows of caches: attention is a function that the caller passes.
"""
