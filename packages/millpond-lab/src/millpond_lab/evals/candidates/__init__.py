"""Candidates besides the methods: oracle and look-ahead runs, and how a candidate is built."""
