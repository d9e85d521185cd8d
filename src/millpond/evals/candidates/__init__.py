"""What is measured beside the methods: oracle and look-ahead runs, and how a candidate is built."""
