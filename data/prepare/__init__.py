"""From text to tokens: any corpus into Megatron's `.bin` and `.idx`."""
