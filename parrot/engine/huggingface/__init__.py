"""The huggingface engine: any model of transformers whose state is the KV of its layers.

This room loads such a model, keeps its KV in blocks behind transformers' cache interface, and runs
steps on it. It owns the KV pool and the model. It must not know of requests or their schedule.
"""
