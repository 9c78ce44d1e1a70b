"""Runners: a step's plan in, sampled tokens out.

This room turns the plan of a step into arrays, computes it on a CPU or a GPU, and chooses a token
for each sequence that asks for one. It owns the KV pool, the device's block table, the captured
graphs and the random numbers of sampling. It must not know why a sequence is in a step, or what
happens to its tokens: the engine core does.
"""
