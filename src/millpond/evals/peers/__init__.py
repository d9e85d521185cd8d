"""Other people's implementations on the same model and the same prompts, each in an environment of its own."""
