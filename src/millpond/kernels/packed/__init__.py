"""Pages of codes: their layout, their memory, and the ops over them."""
