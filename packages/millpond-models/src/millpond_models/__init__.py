"""Small language models that Millpond's examples, tests and tables use, one folder each.

`millpond` finds them by name once this package is installed; nothing here is imported.
"""

__version__ = "0.1.0"
