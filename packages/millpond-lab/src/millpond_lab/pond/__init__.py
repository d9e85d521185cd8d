"""Language of `pond-recall`: its words, the facts that a text can state, and the questions about them."""
