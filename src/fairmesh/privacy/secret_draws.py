"""Random numbers that only a site can compute: the key stream of ChaCha20, keyed by its secret.

Numbers are a function of secret, purpose, generation, round, call and a digest of the model that a gradient is taken
at. So a round that is computed again at the same model repeats its numbers, and at another model has new ones.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fairmesh.errors import optional
from fairmesh.numerics import SECRET_BYTES
from fairmesh.numerics.tracing import values_readable

_WORDS = 2.0**-53


class SecretDraws:
    """The draws of several nodes for one purpose, such as "units" or "noise".

    Args:
        secrets: The secret of each node, 32 bytes.
        purpose: What the numbers are for. Numbers of different purposes are independent.
        device: Where they are used.
    """

    def __init__(self, secrets: Sequence[bytes], purpose: str, device: torch.device):
        if any(len(secret) != SECRET_BYTES for secret in secrets):
            raise ValueError(f"a secret has {SECRET_BYTES} bytes, got {[len(secret) for secret in secrets]}")
        person = b"fairmesh private"
        self._keys = [hashlib.blake2b(purpose.encode(), digest_size=32, key=s, person=person).digest() for s in secrets]
        self._device = device
        if device.type == "cuda":
            words = np.frombuffer(b"".join(self._keys), dtype="<i4").reshape(len(self._keys), 8)
            self._key_words = torch.from_numpy(words.copy()).to(device)

    def uniforms(self, nonces: Tensor, count: int) -> Tensor:
        """Returns uniforms of 53 bits in [0, 1): (nodes, count), float64.

        Args:
            nonces: What the numbers are a function of besides the key: (nodes, 3) int32.
            count: How many of each node.
        """
        return (self._words(nonces, count) >> 11).bitwise_and_((1 << 53) - 1).to(torch.float64).mul_(_WORDS)

    def normals(self, nonces: Tensor, count: int) -> Tensor:
        """Returns standard normal numbers by the Box-Muller transform: (nodes, count), float64. The largest that can
        occur is 8.57; a larger one would have a chance of 2^-53."""
        half = (count + 1) // 2
        uniform = self.uniforms(nonces, 2 * half)
        radius = uniform[:, :half].neg_().add_(1.0).log_().mul_(-2.0).sqrt_()  # of 1 - u, in (0, 1]
        angle = uniform[:, half:].mul_(2 * math.pi)
        return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)[:, :count]

    def _words(self, nonces: Tensor, count: int) -> Tensor:
        """Returns 64-bit integers (nodes, count) of the key stream."""
        if self._device.type == "cuda":
            from fairmesh.privacy.triton_chacha import key_stream

            return key_stream(self._key_words, nonces, count)
        with optional("privacy"):
            from cryptography.hazmat.primitives.ciphers import Cipher
            from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
        rows = nonces.to(torch.int32).cpu().contiguous().numpy()
        streams = np.empty((len(self._keys), count), dtype="<i8")
        zeros = bytes(8 * count)
        for key, nonce, stream in zip(self._keys, rows, streams):  # the first word of the nonce counts blocks
            encryptor = Cipher(ChaCha20(key, bytes(4) + nonce.astype("<i4").tobytes()), mode=None).encryptor()
            stream[:] = np.frombuffer(encryptor.update(zeros), dtype="<i8")
        return torch.from_numpy(streams)


class ModelDigests:
    """Keyed digests of models, 64 bits each: two different models have the same one with a chance of 2^-62.

    Args:
        secrets: The secret of each node.
        device: Where the models are.
    """

    def __init__(self, secrets: Sequence[bytes], device: torch.device):
        self._secrets, self._device = secrets, device
        self._factors = SecretDraws(secrets, "digests", device)
        self._known: Tensor | None = None

    def of(self, rows: Tensor) -> Tensor:
        """Returns the digests of a stack of models (nodes, dim): (nodes, 2) int32."""
        rows = rows.detach().contiguous()
        if self._device.type == "cpu" and values_readable(rows):
            digests = [
                hashlib.blake2b(row.view(torch.uint8).numpy().data, digest_size=8, key=secret, person=b"fairmesh model")
                for secret, row in zip(self._secrets, rows)
            ]
            words = np.frombuffer(b"".join(digest.digest() for digest in digests), dtype="<i4")
            return torch.from_numpy(words.reshape(len(rows), 2).copy())
        # Multilinear hashing: sums of 32-bit words times secret 64-bit numbers, of which the high halves are kept.
        words = rows.view(torch.int32).to(torch.int64).bitwise_and_(0xFFFFFFFF)
        if self._known is None or self._known.shape[-1] != words.shape[-1]:
            none = torch.zeros(len(rows), 3, dtype=torch.int32, device=self._device)
            drawn = self._factors._words(none, 2 * words.shape[-1])
            self._known = drawn.unflatten(1, (2, -1))
        sums = (words.unsqueeze(1) * self._known).sum(dim=-1)  # modulo 2^64
        return (sums >> 32).to(torch.int32)
