"""The sim engine: the real core over a runner that computes nothing and takes the time of a model.

This room says how long each step lasts and which letters it gives, in real or in virtual time. It
owns the costs and the driver that skips many equal steps. It must not know who asks for what.
"""
