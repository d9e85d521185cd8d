"""Prints which of the names given are registered: methods and tasks, those that other packages add among them."""

import sys

import millpond as mp
from millpond_lab.evals.task import TASKS

if __name__ == "__main__":
    print(*sorted({*mp.list_methods(), *TASKS.names()} & {*sys.argv[1:]}))
