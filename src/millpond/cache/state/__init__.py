"""State that a layer keeps per sequence in addition to its entries: positions, queries, head rules, token ids."""
