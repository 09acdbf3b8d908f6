"""`python -m megatron_fp4`, for torchrun's option -m: see command.py."""

from megatron_fp4.command import main

if __name__ == "__main__":
    main()
