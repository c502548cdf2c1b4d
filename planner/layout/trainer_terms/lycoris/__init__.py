"""LyCORIS' adapters, LoKr and LoHa, where a recording has LoRA's two products."""
