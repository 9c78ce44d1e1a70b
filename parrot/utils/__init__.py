from parrot.utils.cprofile import cprofile

__all__ = ["cprofile"]
