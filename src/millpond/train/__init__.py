"""Training: the models that come with the package, their data, and their own measures.

Importing this package loads nothing; take what you need from its modules (`recall.train_recall`, `text.train_text`,
`recall_eval.evaluate_task`).
"""
