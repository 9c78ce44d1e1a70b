from parrot.frontend import pfunc as P
from parrot.protocol import errors as errors

__all__ = ["P", "errors"]
