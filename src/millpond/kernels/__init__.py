"""The op set: `ops` dispatches, `reference` defines every op in plain torch, `native` is C++ and `gpu` is Triton."""
