"""[compressor] What travels: compressors, and the codes of a message as bytes and back, losslessly.

The compressors are public as `fm.compressors`. This module exports the codec, with the exact length of every message.
A message is a header (magic, version, number of parts, round, length, CRC-32) and its parts. A part begins with its
format and dimension; what else it holds follows from the format. The receiver decodes against *templates*, the codes of
a zero row under its own settings, so that nothing a stranger declares decides what is allocated.
"""

from fairmesh.compression.decode import DecodeError, decode
from fairmesh.compression.formats import CODED_HEADER_BYTES, HEADER_BYTES, VERSION, encode, part_sizes, plain_size

__all__ = [
    "CODED_HEADER_BYTES",
    "HEADER_BYTES",
    "VERSION",
    "DecodeError",
    "decode",
    "encode",
    "part_sizes",
    "plain_size",
]
