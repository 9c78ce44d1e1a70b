"""ServeCore under a hundred thousand programs, and what is left of them."""
