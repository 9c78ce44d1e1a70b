"""Matrix products of few rows, with what lies between them: `products` launches them, `tiles` says
how they are divided among programs, and the kernels are in the other modules."""
