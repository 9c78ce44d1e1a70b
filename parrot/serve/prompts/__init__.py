"""Prompts: from a completion's pieces to segments, their prefix keys, and the ids of one model.

The room owns the models' tokenizers and chat templates, and what makes two prompts share a prefix.
It must not know engines, contexts or queues: it turns text into keys and ids, and does nothing
else."""
