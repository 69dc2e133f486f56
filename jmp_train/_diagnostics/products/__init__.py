"""Are Tensor Cores used, and what would more of them bring? Dots and convolutions of a traced program."""
