"""Every error this package raises on purpose.

SaguaroError
├── ConfigError        a file, option or request that cannot work: names file, key, limit and remedy
├── ModelError         weights that are missing, damaged or not what they claim to be
├── EngineError        an engine directory or runtime that cannot run this model here
├── CapacityError      not enough memory, blocks, disk or queue
├── DrainingError      the deployment is shutting down and takes no more requests
├── ProtocolError      bytes from the peer that this version cannot accept
├── LinkError          the peer is gone or did not answer before the deadline
└── LaunchError        a process of a deployment did not start or died

A message is one paragraph: what is wrong, where, and what to do about it.
"""


class SaguaroError(Exception):
    """Base class; the command line prints it as one paragraph and exits with status 1."""


class ConfigError(SaguaroError):
    """A file, option or request that cannot work."""


class ModelError(SaguaroError):
    """Weights that are missing, damaged or not what they claim to be."""


class EngineError(SaguaroError):
    """An engine directory or runtime that cannot run this model here."""


class CapacityError(SaguaroError):
    """Not enough memory, KV blocks, disk or queue."""


class DrainingError(SaguaroError):
    """The deployment is shutting down and takes no more requests."""


class ProtocolError(SaguaroError):
    """Bytes from the peer that this version cannot accept."""


class LinkError(SaguaroError):
    """The peer is gone or did not answer before the deadline."""


class LaunchError(SaguaroError):
    """A process of a deployment did not start or died."""
