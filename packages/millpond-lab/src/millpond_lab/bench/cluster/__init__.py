"""One engine, replicas and split workers under the same load, in turns."""
