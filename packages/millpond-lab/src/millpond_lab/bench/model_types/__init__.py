"""A survey of the language model types of transformers in tiny form: whether a Millpond cache carries each."""
