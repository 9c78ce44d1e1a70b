"""Contexts: which prefix lives on which engine, what uses it will have, and which goes first.

The room owns every record of a context, the index that finds one by its prompt, and what is known
of future uses: ready prefixes, think times, forecasts. It must not know how a run is placed or
carried out, and never talks to an engine: what is to be freed it hands to whoever asks."""
