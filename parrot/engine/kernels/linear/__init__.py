"""Matrix products of few rows, fused with the operations before and after them.

`products` launches the kernels, and `tiles` has their tile sizes."""
