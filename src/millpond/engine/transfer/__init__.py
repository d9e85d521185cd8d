"""A request in flight as bytes, and back: how it moves from one engine to another."""
