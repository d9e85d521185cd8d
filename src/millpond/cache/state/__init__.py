"""State that a layer keeps per sequence besides its entries: positions, queries, head rules, token ids."""
