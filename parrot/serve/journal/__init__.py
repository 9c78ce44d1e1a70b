"""The journal: a file from which a ServeCore that died goes on.

Owns the file, the thread that writes it, and what its records say. It must not know what a record
does when it is read back: that is the verb's own business."""
