"""Training: the small bundled recall model, its data, its tokenizer and its own measure.

Importing this package loads nothing; take what you need from its modules (`bundled.train_bundled`,
`bundled_eval.evaluate_recall`, `recall_data.make_prompt`).
"""
