"""The op set: what makes the rest fast. `ops` dispatches, `reference` is the truth, `native` and `gpu` are quick."""
