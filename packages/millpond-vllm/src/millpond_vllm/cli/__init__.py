"""The command line `millpond-vllm`."""
