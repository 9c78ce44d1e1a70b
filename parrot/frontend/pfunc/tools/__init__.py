"""Tools, which are functions of the program that a model may call, and agents that use them."""
