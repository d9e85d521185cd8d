"""`python -m millpond_vllm`, the same as `millpond-vllm`."""

from millpond_vllm.cli.app import main

if __name__ == "__main__":
    main()
